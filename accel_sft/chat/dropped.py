"""Refuses an example if the chat template drops a part of it: its answer, a call of a tool, or a turn's text."""

import functools
import json
import re

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Conversation, Turn, Turns, divided, split_thinking
from accel_sft.chat.pictures import IMAGE_MARK
from accel_sft.chat.rendering import Rendered
from accel_sft.chat.template import MARK
from accel_sft.io.text import common_length, one_line

_QUOTED = 32
"""Number of an answer's characters that a message quotes."""


class AnswerDropped(UserError):
    """A chat template drops or cuts an answer."""


class TextDropped(UserError):
    """A chat template drops the text of a message."""


class NotAPrefix(UserError):
    """A prompt is not a prefix of the same prompt with its answer."""


def check_all_kept(where: str, chat: Conversation, text: Rendered, *, keeps_thinking: bool) -> None:
    """Raise one of the errors above if the texts of a rendering, with guards removed, lack a part of the conversation
    that must be there."""
    thinking, answer = divided(chat)
    fixable = not keeps_thinking and thinking is not None
    if text.apart and not fixable:
        at = max(common_length([text.prompt, text.full_text]) - _QUOTED // 2, 0)
        asked, answered = (one_line(written[at : at + _QUOTED]) for written in (text.prompt, text.full_text))
        difference = f'"{asked}" becomes "{answered}"'
        raise NotAPrefix(
            f"{where}: the prompt is not a prefix of prompt + answer: {difference}; change the template, or target()"
        )
    wanted = [thinking or "", answer] if keeps_thinking or "reasoning_content" in chat.answer else [chat.target]
    if text.apart or text.form.drops_answer or not all(holds(text.prompt, text.rest, part) for part in wanted):
        raise _refusal(where, text, chat.target, thinks=fixable)
    functions = [call["function"] for call in chat.calls]
    names = [name for function in functions for name in (function["name"], *function["arguments"])]
    if lost := next((name for name in names if name not in text.rest), None):
        raise _refusal(where, text, f"the call of a tool, with {lost}", thinks=False)
    if text.prompt and (missing := _missing(chat.turns, text.prompt)):  # rows without any prompt are left out
        role, words = missing
        raise TextDropped(
            f'{where}: the chat template drops "{one_line(words)}" of the {role} turn; choose a --chat-template that '
            "writes every message, or change messages()"
        )


def unwritten(turns: Turns, prompt: str) -> list[str]:
    """Return a warning for each kind of text that a prompt (guards removed) lacks although the row is accepted."""
    lines = []
    if any(_lacking(turn, prompt) for turn in turns if "tool_calls" in turn):
        lines.append("warning: the chat template drops the text of turns that call a tool; no prompt contains it")
    names = [turn["name"] for turn in turns if "name" in turn and turn["role"] != "tool"]
    if not all(name in prompt for name in names):
        lines.append("warning: the chat template does not write the names of turns (name); put them into the texts")
    return lines


def holds(prompt: str, rest: str, target: str) -> bool:
    """Whether `rest`, which follows a rendered prompt, contains the answer `target`. White space is ignored: templates
    strip it around answers, and move it around thinking. The mark that opens thinking may end the prompt instead."""
    if target.strip() in rest:
        return True
    opened = MARK.findall(prompt)[-1:]
    if opened and prompt.rstrip().endswith(opened[0]):
        target = target.lstrip().removeprefix(opened[0])
    return "".join(target.split()) in "".join(rest.split())


def _refusal(where: str, text: Rendered, target: str, *, thinks: bool) -> AnswerDropped:
    """Return the error for a template that drops or cuts an answer; `thinks`: whether to advise --thinking keep."""
    made = one_line(text.full_text[common_length([text.prompt, text.full_text]) :], _QUOTED)
    fix = "give --thinking keep" if thinks else "change the template or target()"
    return AnswerDropped(
        f'{where}: the answer would not be trained on: the chat template writes "{made}" instead of '
        f'"{one_line(target, _QUOTED)}"; {fix}'
    )


def _missing(turns: Turns, prompt: str) -> tuple[str, str] | None:
    """Return role and text of the first turn whose text a prompt lacks; None if all texts are there. Turns with calls,
    and tools' results in JSON, do not count: templates rewrite such turns or leave them out."""
    for turn in turns:
        if "tool_calls" in turn or (turn["role"] == "tool" and turn["content"].lstrip()[:1] in ("{", "[")):
            continue
        if words := _lacking(turn, prompt):
            return turn["role"], words
    return None


def _lacking(turn: Turn, prompt: str) -> str:
    """Return the first text of a turn that a prompt contains neither as it is nor as JSON; "" if none is missing. White
    space, thinking, `/think` and `/no_think` do not count: templates rewrite them or leave them out."""
    content: str = turn["content"]
    if turn["role"] == "assistant":
        content = split_thinking(content)[1].rpartition("</think>")[2]
    for text in content.split(IMAGE_MARK):
        if text.strip() in prompt:
            continue
        compact = _compact_prompt(prompt)
        if _compact(text) not in compact and _compact(json.dumps(text, ensure_ascii=False)[1:-1]) not in compact:
            return text.strip()
    return ""


def _compact(text: str) -> str:
    return re.sub(r"\s+|/(?:no_?)?think", "", text)


_compact_prompt = functools.lru_cache(maxsize=1)(_compact)  # the same for all turns of a conversation
