"""Decides by probes, once for each order of roles, how a chat template is asked for prompts and answers."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import GUARD, Conversation, Turns
from accel_sft.chat.form import Form, closing_mark, divided, parting, remarks
from accel_sft.chat.pictures import parted
from accel_sft.chat.template import MARK, Rejected, dated, rendered
from accel_sft.chat.tool_calls import takes_text_only, with_text_arguments
from accel_sft.io.text import one_line

_ANSWER, _THOUGHT, _TURN = "\ue000\ue001", "\ue002\ue003", "\ue004{}\ue005"
"""Probes, which stand for an answer, its thinking and a turn: characters that no template strips or splits."""
_ESCAPED_GUARD = GUARD.encode("unicode_escape").decode()
"""GUARD as it appears if a template prints a list or an object as Python does: `{{ tools }}`."""

Tools = list[dict[str, Any]] | None


class Rendered(NamedTuple):
    """A conversation as text: the prompt that generation begins with, and the rest, which is learnt after it.

    `rest` is None if the prompt does not begin the rendering with the answer. `whole` is the template's own rendering
    of prompt and answer, for messages.
    """

    prompt: str
    rest: str | None
    whole: str


class Rendering:
    """A tokenizer's chat template, used alike in training and evaluation, with `--thinking` and the day fixed.

    Its decisions depend only on the tokenizer, the settings and the order of roles in a conversation, so they are the
    same on every rank. `notes` has a line for each thing done beside what the template does itself.

    Args:
        thinking: "off", "template" or "keep".
        day: YYYY-MM-DD that the template is told; None: the day on which it is rendered.
        control_tokens: "text" or "tokens": what `control` reads control tokens in texts as.
    """

    def __init__(
        self,
        tokenizer: Any,
        thinking: str | None = "template",
        day: str | None = None,
        control_tokens: str | None = "text",
    ) -> None:
        self.tokenizer, self.thinking = tokenizer, thinking or "template"
        self.control = ControlTokens(tokenizer, control_tokens != "tokens")
        try:
            self.template = dated(tokenizer.get_chat_template(), day)
        except ValueError as error:  # it has several named templates and no default
            raise UserError(f"the model's chat template cannot be chosen: {one_line(str(error))}") from error
        on = {"off": False, "keep": True}.get(self.thinking)
        names = () if on is None else ("enable_thinking", "thinking")
        self.arguments = {name: on for name in names if re.search(rf"\b{name}\b", self.template)}
        self.notes: list[str] = []
        self._forms: dict[tuple[Any, ...], Form] = {}

    def note(self, line: str) -> None:
        """Add a line to `notes`, once."""
        if line not in self.notes:
            self.notes.append(line)

    def examples(self, chats: Sequence[Conversation], split: str) -> list[Rendered]:
        """Each conversation's prompt and the answer that is learnt after it, as guarded texts for `control.ids`.

        Raises:
            UserError: the template rejects the messages, or fails.
        """
        chats = [self.control.guarded(chat) for chat in chats]
        forms = [self.form(chat.turns, split, chat.tools) for chat in chats]
        thoughts = [divided(chat) if self.thinking == "keep" else (None, chat.target) for chat in chats]
        full = []
        for form, chat, (thinking, answer) in zip(forms, chats, thoughts, strict=True):
            more = {name: value for name, value in chat.answer.items() if name not in ("content", "reasoning_content")}
            if self.thinking != "keep":
                answer, thinking = chat.answer["content"], chat.answer.get("reasoning_content")
            elif form.thinking_as != "field":
                answer, thinking = chat.target, None
            full.append(parted(form.with_answer(chat.turns, answer, thinking, more), chat.images))
        tools = [chat.tools for chat in chats]
        given = [parted(form.given(chat.turns), chat.images) for form, chat in zip(forms, chats, strict=True)]
        asked, whole = self._rendered(given, split, True, tools), self._rendered(full, split, False, tools)
        moved = [at for at, form in enumerate(forms) if form.system_moves]
        probes = [parted(forms[at].with_answer(chats[at].turns, _ANSWER), chats[at].images) for at in moved]
        probed = self._rendered(probes, split, False, [tools[at] for at in moved])
        heads = {at: text.partition(_ANSWER)[0] for at, text in zip(moved, probed, strict=True)}
        return [self._joined(forms[at], asked[at], whole[at], heads.get(at), *thoughts[at]) for at in range(len(forms))]

    def form(self, turns: Turns, split: str, tools: Tools = None) -> Form:
        """How conversations with the roles of these turns are rendered.

        Raises:
            UserError: the template rejects the messages, or fails.
        """
        # a turn with calls and no text has no text in the probe either: templates check for that
        silent = ["tool_calls" in turn and not turn["content"] for turn in turns]
        called = ("tool_calls" in turn for turn in turns)
        shape = (tools is not None, *zip((turn["role"] for turn in turns), called, silent, strict=True))
        if shape not in self._forms:
            probes = [{**turn, "content": "" if silent[at] else _TURN.format(at)} for at, turn in enumerate(turns)]
            try:
                self._forms[shape] = self._decided(probes, split, tools)
            except Rejected:  # some templates parse contents, such as a tool's JSON
                self._forms[shape] = self._decided(turns, split, tools)
        return self._forms[shape]

    def _joined(
        self, form: Form, asked: str, whole: str, head: str | None, thinking: str | None, answer: str
    ) -> Rendered:
        """`head` is the rendering up to the answer if the system text moves, else None."""
        if form.thinking_as == "written" and thinking is not None and (form.sound or form.system_moves):
            opening, mark = ("", form.closing_mark) if form.closing_mark else ("<think>", "</think>")
            return Rendered(asked, f"{opening}{thinking}{mark}{answer}{form.tail}", whole)
        begins = form.before_lead(asked)
        if head is not None:
            begins = head[: len(head) - len(form.lead or "")]
        elif not form.sound or not asked.endswith(form.unwritten):
            return Rendered(asked, None, whole)
        if not whole.startswith(begins):
            return Rendered(asked, None, whole)
        rest = whole[len(begins) :]
        if closing := self.closing(form):
            if not form.closing and not rest.startswith(closing):
                return Rendered(asked, None, whole)
            return Rendered(asked + closing, rest if form.closing else rest[len(closing) :], whole)
        if form.closing and form.closing_mark not in rest:
            rest = form.closing + rest
        return Rendered(asked, rest, whole)

    def closing(self, form: Form) -> str:
        """What is appended to prompts: under `--thinking off`, the end of a block that the prompt opens; else ""."""
        return form.closing or form.closed_by_template if self.thinking == "off" else ""

    def tail(self, form: Form) -> str:
        """What follows an answer as plain text: the template's text there, up to its first control token."""
        end = self.control.pattern.search(form.tail)
        return form.tail[: end.start()] if end else form.tail

    def lead(self, form: Form) -> str:
        """The text between a prompt and its answer, which is learnt too."""
        if self.closing(form):
            return (form.lead or "").removeprefix(form.closed_by_template)
        return form.closing + (form.lead or "")

    def _decided(self, turns: Turns, split: str, tools: Tools) -> Form:
        form, asked, whole = self._accepted(turns, split, tools)
        head, written, tail = whole.partition(_ANSWER)
        if not written:
            return dataclasses.replace(form, lead=None)
        at = parting(asked, head)
        unwritten, lead, instead = asked[at:], head[at:], ""
        # the difference must lie after the last turn, and may be marks, but no words such as another header
        sound = not unwritten or (turns[-1]["content"] in asked[:at] and not MARK.sub("", lead).strip())
        others, moves = [turn for turn in turns if turn["role"] != "system"], False
        if not sound and not form.folds_system and 0 < len(others) < len(turns):
            inner = self.form(others, split, tools)
            moves = inner.sound and inner.lead is not None
            moves = moves and asked.endswith(inner.unwritten) and head.endswith(inner.lead)
            if moves:
                unwritten, lead, instead = inner.unwritten, inner.lead, inner.instead
        if unwritten and unwritten.endswith(lead):  # Granite's switch stands before the last mark of the prompt
            instead, lead = lead, ""
        around = {"unwritten": unwritten, "instead": instead, "lead": lead, "tail": tail}
        form = dataclasses.replace(form, sound=sound, system_moves=moves, **around)
        if mark := closing_mark(asked):
            closing = "" if mark in lead else f"\n{mark}\n\n" if asked.endswith("\n") else mark
            form = dataclasses.replace(form, closing_mark=mark, closing=closing)
        if self.thinking == "keep":
            form = self._with_thinking(form, turns, asked, split, tools)
        for line in remarks(form, turns, asked, self.closing(form)):
            self.note(line)
        if tools and not re.search(r"\btools\b", self.template):
            self.note("warning: the chat template takes no tools; what tools() gives is not in the prompts")
        return form

    def _accepted(self, turns: Turns, split: str, tools: Tools) -> tuple[Form, str, str]:
        """The first way of giving turns in which the template keeps every text, or else the first that it accepts; with
        the prompt, and the rendering with an answer."""
        folds = (False, True) if any(turn["role"] == "system" for turn in turns) else (False,)
        refused, first = None, None
        for form in (Form(folds_system=folds_system, parts=parts) for parts in (False, True) for folds_system in folds):
            try:
                (asked,) = self._rendered([form.given(turns)], split, True, [tools])
                (whole,) = self._rendered([form.with_answer(turns, _ANSWER)], split, False, [tools])
            except Rejected as error:
                refused = refused or error
                continue
            first = first or (form, asked, whole)
            told = (turn["content"].strip() for turn in turns if "tool_calls" not in turn)  # often left out
            kept = _ANSWER in whole and all(text in asked for text in told)
            if kept and not (form.parts and re.search(r"'text'|\"text\"", whole)):  # the list itself, printed
                return form, asked, whole
        if first is None:
            raise refused
        return first

    def _with_thinking(self, form: Form, turns: Turns, asked: str, split: str, tools: Tools) -> Form:
        """`form` with the first way of giving a target's thinking in which the template keeps it."""
        begins = "" if form.system_moves else form.before_lead(asked)
        try:
            (field,) = self._rendered([form.with_answer(turns, _ANSWER, _THOUGHT)], split, False, [tools])
        except Rejected:
            field = ""
        found = re.fullmatch(f"(.*?){_THOUGHT}(.*?){_ANSWER}.*", field[len(begins) :], re.S)
        if found and field.startswith(begins):
            before = "" if form.system_moves else found[1].strip()
            return dataclasses.replace(form, thinking_as="field", thinking_marks=(before, found[2].strip()))
        thoughtful = form.with_answer(turns, f"<think>{_THOUGHT}</think>{_ANSWER}")
        (whole,) = self._rendered([thoughtful], split, False, [tools])
        rest = whole[len(begins) :]
        twice = form.closing_mark and MARK.match(rest.lstrip())  # the prompt opened the block already
        kept = whole.startswith(begins) and _THOUGHT in rest and not twice
        return form if kept else dataclasses.replace(form, thinking_as="written")

    def _rendered(self, conversations: Sequence[Turns], split: str, prompt: bool, tools: Sequence[Tools]) -> list[str]:
        """Each conversation as the template writes it with its tools; neighbours with the same tools form a batch."""
        texts: list[str] = []
        for offered, group in itertools.groupby(zip(conversations, tools, strict=True), key=itemgetter(1)):
            given = self.arguments if offered is None else {**self.arguments, "tools": offered}
            chats = [turns for turns, _ in group]
            if any("tool_calls" in turn for turns in chats for turn in turns) and self._takes_text_only:
                chats = [with_text_arguments(turns) for turns in chats]
            texts += self._render(chats, split, prompt, given)
        return texts

    def _render(self, chats: Sequence[Turns], split: str, prompt: bool, given: dict[str, Any]) -> list[str]:
        texts = rendered(self.tokenizer, self.template, chats, split, prompt=prompt, given=given)
        return [text.replace(_ESCAPED_GUARD, GUARD) for text in texts] if self.control.as_text else texts

    @functools.cached_property
    def _takes_text_only(self) -> bool:
        return takes_text_only(lambda turns: self._render([turns], "train", False, self.arguments))
