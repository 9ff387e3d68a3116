"""Finds thinking in texts: that with which a target begins, and a block that the end of a prompt opens."""

import re

from accel_sft.chat.conversation import Conversation

_THINKS = re.compile(r"\s*<think>(.*?)</think>\s*", re.S)
_OPENED = re.compile(
    r"(?:(?P<bracket><\|?|\[|◁)"
    r"(?P<name>(?!END|end_of)[\w:]*(?:think|thought|reason)[\w:]*)"
    r"(?P<end>\|?>|\]|▷)|<\|channel>thought)\s*$",
    re.IGNORECASE,
)
"""A mark at a text's end that opens thinking: `<think>`, `[THINK]`, `◁think▷`, `<|START_THINKING|>`, Gemma's
channel."""


def split_thinking(target: str) -> tuple[str | None, str]:
    """The thinking that a target begins with (None without any), and the answer after it."""
    found = _THINKS.match(target)
    return (found[1], target[found.end() :]) if found else (None, target)


def divided(chat: Conversation) -> tuple[str | None, str]:
    """The thinking of a conversation's answer (None without any), and the answer after it."""
    thinking = chat.answer.get("reasoning_content")
    return split_thinking(chat.target) if thinking is None else (thinking, chat.answer["content"])


def wanted(chat: Conversation, thinking: str | None) -> str:
    """The text that an answer is scored against: the target; under `--thinking keep`, without its thinking."""
    return divided(chat)[1] if thinking == "keep" else chat.target


def closing_mark(text: str) -> str | None:
    """Return the mark that closes the thinking block which a text's end opens; None if it opens no block."""
    found = _OPENED.search(text)
    if not found:
        return None
    name = found["name"]
    if name is None:
        return "<channel|>"
    for opening, closing in (("START_", "END_"), ("begin_of", "end_of")):
        if opening in name:
            return found["bracket"] + name.replace(opening, closing) + found["end"]
    return f"{found['bracket']}/{name}{found['end']}"
