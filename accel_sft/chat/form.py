"""How conversations of one shape are given to a chat template, and what it writes around their answers."""

import dataclasses
import json
import re
from typing import Any

from accel_sft.chat.conversation import Conversation, Turn, Turns
from accel_sft.chat.pictures import MARK as IMAGE
from accel_sft.chat.template import MARK
from accel_sft.io.prefix import common_length
from accel_sft.io.text import one_line

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


@dataclasses.dataclass(frozen=True)
class Form:
    """How conversations of one order of roles are given to the template, and what it writes around their answers.

    Attributes:
        folds_system: the system text is put before the first user turn's, because the template takes no system role.
        parts: each content is a list of one text part.
        sound: the rendering with an answer begins with the generation prompt, except for the prompt's end `unwritten`.
        unwritten: the end of the generation prompt that the template leaves out if an answer follows.
        instead: what the template writes in its place: the end of `unwritten`, or nothing.
        system_moves: the rendering with an answer has no system text, or has it elsewhere; its prompt is not used.
        lead: what the template writes between the prompt and the answer; None: it drops the answer.
        tail: what the template writes after the answer.
        closing_mark: the mark that closes the block opened by the generation prompt; None: it opened none.
        closing: text that closes that block if the template does not.
        thinking_as: how a target's thinking is given: in the "content", in its own "field", or "written" by us.
        thinking_marks: what then stands before the thinking, and between it and the answer.
    """

    folds_system: bool = False
    parts: bool = False
    sound: bool = True
    unwritten: str = ""
    instead: str = ""
    system_moves: bool = False
    lead: str | None = ""
    tail: str = ""
    closing_mark: str | None = None
    closing: str = ""
    thinking_as: str = "content"
    thinking_marks: tuple[str, str] = ("<think>", "</think>")

    @property
    def closed_by_template(self) -> str:
        """The beginning of `lead` that closes the block which the prompt opened."""
        found = re.match(rf".*?{re.escape(self.closing_mark)}\s*", self.lead or "", re.S) if self.closing_mark else None
        return found[0] if found else ""

    def before_lead(self, asked: str) -> str:
        """The rendering with an answer up to `lead`, computed from the prompt `asked`."""
        return asked[: len(asked) - len(self.unwritten)] + self.instead

    def given(self, turns: Turns) -> list[dict[str, Any]]:
        """The turns as the template takes them."""
        if self.folds_system:
            system = "\n\n".join(turn["content"] for turn in turns if turn["role"] == "system")
            turns = [turn for turn in turns if turn["role"] != "system"]
            at = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), None)
            if at is None:
                turns = [{"role": "user", "content": system}, *turns]
            else:
                asked = {**turns[at], "content": f"{system}\n\n{turns[at]['content']}"}
                turns = [*turns[:at], asked, *turns[at + 1 :]]
        if self.parts:
            return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return turns

    def with_answer(
        self, turns: Turns, answer: str, thinking: str | None = None, more: Turn | None = None
    ) -> list[dict[str, Any]]:
        """The turns and an answer, as the template takes them.

        Args:
            thinking: given in a field of its own, `reasoning_content`.
            more: further fields of the answer's turn, such as tool calls.
        """
        given = self.given([*turns, {**(more or {}), "role": "assistant", "content": answer}])
        if thinking is not None:
            given = [*given[:-1], {**given[-1], "reasoning_content": thinking}]
        return given


def closing_mark(text: str) -> str | None:
    """The mark that closes the thinking block which opens at a text's end; None if none does."""
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


def dropped(turns: Turns, prompt: str) -> tuple[str, str] | None:
    """The role of the first turn that has a text missing from a rendered prompt, and that text; None if none has.

    Ignored are white space, the thinking of earlier answers, turns with tool calls, JSON results of tools, and the
    switches `/think` and `/no_think`: templates rewrite these or leave them out. A text may be written as JSON.
    """
    whole = None
    for turn in turns:
        role, content = turn["role"], turn["content"]
        if "tool_calls" in turn or (role == "tool" and content.lstrip()[:1] in ("{", "[")):
            continue
        if role == "assistant":
            content = split_thinking(content)[1].rpartition("</think>")[2]
        for text in content.split(IMAGE):
            if text.strip() in prompt:
                continue
            whole = whole or _compact(prompt)
            if _compact(text) not in whole and _compact(json.dumps(text, ensure_ascii=False)[1:-1]) not in whole:
                return role, text.strip()
    return None


def _compact(text: str) -> str:
    return re.sub(r"\s+|/(?:no_?)?think", "", text)


def parting(asked: str, head: str) -> int:
    """The place where two texts begin to differ, moved to the beginning of a mark that it lies within."""
    at = common_length([asked, head])
    for text in (asked, head):
        at = next((mark.start() for mark in MARK.finditer(text) if mark.start() < at < mark.end()), at)
    return at


def remarks(form: Form, turns: Turns, asked: str, closing: str) -> list[str]:
    """A line for each thing that the trainer does beside what the template does itself.

    Args:
        asked: the prompt that the template writes for `turns`.
        closing: what the trainer appends to the prompt.
    """
    lines = []
    if form.folds_system:
        lines.append("chat template: it takes no system message; its text is put before the first user turn's")
    if form.parts:
        lines.append("chat template: it takes lists of parts; each content is given as one text part")
    if form.system_moves:
        lines.append("chat template: it puts the system message elsewhere once an answer follows; it stays as asked")
    if form.unwritten and form.lead is not None and (form.sound or form.system_moves):
        lines.append(
            f'chat template: prompts end with "{one_line(form.unwritten)}", which it leaves out once an answer '
            "follows; what is learnt follows the prompt as it is generated from"
        )
    if closing:
        lines.append(f'--thinking off: prompts end with an opened block; the trainer adds "{one_line(closing)}"')
    elif form.closing:
        lines.append(
            f'chat template: prompts open a block that answers do not close; "{one_line(form.closing)}" is learnt '
            "before an answer that has no thinking"
        )
    if form.thinking_as == "written":
        lines.append("--thinking keep: the chat template drops thinking; it is written behind the prompt as it is")
    if all(turn["role"] != "user" for turn in turns):
        roles = "/".join(turn["role"] for turn in turns)
        lines.append(f"warning: conversations without a user turn (roles {roles}): see that messages() means that")
    return lines
