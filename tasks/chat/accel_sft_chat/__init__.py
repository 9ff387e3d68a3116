"""A task for accel_sft: trains on chats, read from files in the forms in which chats are published."""

from accel_sft_chat.task import Chat

__all__ = ["Chat"]
