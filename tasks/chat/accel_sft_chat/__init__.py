"""A task for accel_sft: chats, read from files in the forms in which they are published."""

from accel_sft_chat.task import Chat

__all__ = ["Chat"]
