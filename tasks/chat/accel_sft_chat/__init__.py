"""Chats in the forms they are published in, read from files: a task for accel_sft."""

from accel_sft_chat.task import Chat

__all__ = ["Chat"]
