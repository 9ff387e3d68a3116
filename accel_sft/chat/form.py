"""Finds out, with probes for each order of roles, how a chat template takes conversations and what it writes around
answers."""

import dataclasses
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from accel_sft.chat.conversation import Turn, Turns
from accel_sft.chat.template import MARK, ChatTemplate, Rejected
from accel_sft.io.text import common_length, one_line

ANSWER, _THOUGHT, _TURN = "\ue000\ue001", "\ue002\ue003", "\ue004{}\ue005"
"""Placeholders (probes) for an answer, its thinking and a turn: characters that no template strips or splits."""


HEADER_LEARNT = "warning D215: the model learns to write"
"""Begins the note on a template whose prompts do not end with the answer's header; docs/check.md explains D215."""
_OPENED = re.compile(
    r"(?:(?P<bracket><\|?|\[|◁)"
    r"(?P<name>(?!END|end_of)[\w:]*(?:think|thought|reason)[\w:]*)"
    r"(?P<end>\|?>|\]|▷)|<\|channel>thought)\s*$",
    re.IGNORECASE,
)
"""A mark at a text's end that opens thinking: `<think>`, `[THINK]`, `◁think▷`, `<|START_THINKING|>`, Gemma's
channel."""
_PROMPT_FLAG = r"\badd_generation_prompt\b"


@dataclasses.dataclass(frozen=True)
class Form:
    """How conversations of one order of roles are given to the template, and what the template writes around answers.

    Attributes:
        folds_system: the system text is put before the first user turn's, because the template takes no system role.
        parts: each content is given as a list of one text part.
        drops_answer: the template drops the answer; the attributes below are then unknown.
        sound: the prompt without `unwritten` is a prefix of the rendering with an answer.
        unwritten: the end of the generation prompt that the template leaves out if an answer follows.
        instead: what replaces `unwritten` if an answer follows: the last part of `unwritten`, or "".
        system_moves: if an answer follows, the template drops or moves the system text, so the prompt is not a prefix.
        lead: what the template writes between the prompt and the answer.
        tail: what the template writes after the answer.
        closing_mark: the mark that closes the block opened by the generation prompt; "" if it opens none.
        closing: text that the trainer adds to close that block if the template does not.
        prompt_end: text appended to prompts under `--thinking off`: the end of a block that the prompt opens.
        thinking_as: how a target's thinking gets into the text. With "content" or "field", the template gets it in the
            content or in a separate field; with "written", Rendering writes it after the prompt.
        thinking_marks: the texts before the thinking, and between the thinking and the answer.
        own_system: the beginning of the system prompt that the template writes if no turn has the role system.
    """

    folds_system: bool = False
    parts: bool = False
    drops_answer: bool = False
    sound: bool = True
    unwritten: str = ""
    instead: str = ""
    system_moves: bool = False
    lead: str = ""
    tail: str = ""
    closing_mark: str = ""
    closing: str = ""
    prompt_end: str = ""
    thinking_as: str = "content"
    thinking_marks: tuple[str, str] = ("<think>", "</think>")
    own_system: str = ""

    @property
    def closed_by_template(self) -> str:
        """The beginning of `lead` that closes the block opened by the prompt; "" if there is none."""
        match = re.match(rf".*?{re.escape(self.closing_mark)}\s*", self.lead, re.S) if self.closing_mark else None
        return match[0] if match else ""

    @property
    def learnt_lead(self) -> str:
        """The text between a prompt and its answer, which is learnt too."""
        return self.lead.removeprefix(self.closed_by_template) if self.prompt_end else self.closing + self.lead

    def before_lead(self, prompt: str) -> str:
        """Return the part before `lead` of the rendering with an answer, computed from `prompt`."""
        return prompt[: len(prompt) - len(self.unwritten)] + self.instead

    def rest_of(self, full_text: str, prompt: str, head: str | None) -> str | None:
        """Return the learnt text after the rendered prompt; None if `full_text`, the rendering with the answer, does
        not begin with the prompt. `head` is `full_text` up to the answer if the system text moves, else None."""
        if head is not None:
            begins = head[: len(head) - len(self.lead)]
        elif self.sound and prompt.endswith(self.unwritten):
            begins = self.before_lead(prompt)
        else:
            return None
        rest = full_text[len(begins) :]
        if not full_text.startswith(begins):
            return None
        if self.prompt_end and not self.closing:  # the template itself closes the block that the prompt opens
            return rest.removeprefix(self.prompt_end) if rest.startswith(self.prompt_end) else None
        if self.closing and not self.prompt_end and self.closing_mark not in rest:
            return self.closing + rest
        return rest

    def given(self, turns: Turns) -> Turns:
        """Return the turns as the template takes them."""
        if self.folds_system:
            texts = [turn["content"] for turn in turns if turn["role"] == "system" and turn["content"].strip()]
            turns = [turn for turn in turns if turn["role"] != "system"]
            at = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), -1)
            if texts and at < 0:
                turns = [{"role": "user", "content": "\n\n".join(texts)}, *turns]
            elif texts:
                question = {**turns[at], "content": "\n\n".join([*texts, turns[at]["content"]])}
                turns = [*turns[:at], question, *turns[at + 1 :]]
        if self.parts:
            return [{**turn, "content": [{"type": "text", "text": turn["content"]}]} for turn in turns]
        return turns

    def with_answer(self, turns: Turns, answer: str, thinking: str | None = None, more: Turn | None = None) -> Turns:
        """Return turns and answer as the template takes them. `thinking` goes into a separate field, and `more` has
        further fields of the answer's turn, such as tool calls."""
        given = self.given([*turns, {**(more or {}), "role": "assistant", "content": answer}])
        if thinking is not None:
            given = [*given[:-1], {**given[-1], "reasoning_content": thinking}]
        return given


class Forms:
    """Finds the forms of conversations. A form depends only on the template, `--thinking`, the offered variables (of
    tools, only whether there are any), and the order of roles, calls and empty texts. `note` is called with each line
    for the user."""

    def __init__(self, template: ChatTemplate, thinking: str, note: Callable[[str], None]) -> None:
        self._template, self._thinking, self._note = template, thinking, note
        self._forms: dict[tuple[Any, ...], Form] = {}

    def __call__(self, turns: Turns, split: str, offered: dict[str, Any] | None = None) -> Form:
        """Return the form of conversations that have the roles and the calls of these turns."""
        offered = offered or {}
        # turns with calls, and system turns, that are empty stay empty in the probe: templates check for this
        silent = [not turn["content"].strip() and ("tool_calls" in turn or turn["role"] == "system") for turn in turns]
        called = ("tool_calls" in turn for turn in turns)
        variables = json.dumps({**offered, "tools": "tools" in offered}, sort_keys=True, default=str)
        shape = (variables, *zip((turn["role"] for turn in turns), called, silent, strict=True))
        if shape not in self._forms:
            probes = [{**turn, "content": "" if silent[at] else _TURN.format(at)} for at, turn in enumerate(turns)]
            try:
                self._forms[shape] = self._decided(probes, split, offered)
            except Rejected:  # templates that parse contents, such as a tool's JSON, refuse probes
                self._forms[shape] = self._decided(turns, split, offered)
        return self._forms[shape]

    def _decided(self, turns: Turns, split: str, offered: dict[str, Any]) -> Form:
        form, prompt, full_text = self._accepted(turns, split, offered)
        head, answered, tail = full_text.partition(ANSWER)
        if not answered:
            return dataclasses.replace(form, drops_answer=True)
        form = self._between(dataclasses.replace(form, tail=tail), turns, prompt, head, split, offered)
        if mark := closing_mark(prompt):
            closing = "" if mark in form.lead else f"\n{mark}\n\n" if prompt.endswith("\n") else mark
            form = dataclasses.replace(form, closing_mark=mark, closing=closing)
        if self._thinking == "off":
            form = dataclasses.replace(form, prompt_end=form.closing or form.closed_by_template)
        if self._thinking == "keep":
            form = self._with_thinking(form, turns, prompt, split, offered)
        if turns[0]["role"] == "user" and not offered:
            if "name" in turns[0]:  # some templates write the name before the text
                unnamed = [{"role": "user", "content": turns[0]["content"]}, *turns[1:]]
                prompt = self._template.text(form.given(unnamed), split, prompt=True, offered=offered)
            form = dataclasses.replace(form, own_system=_own_system(prompt, turns[0]["content"] or ANSWER))
        for line in (*_remarks(form, turns), *self._warnings(form, offered)):
            self._note(line)
        return form

    def _between(self, form: Form, turns: Turns, prompt: str, head: str, split: str, offered: dict[str, Any]) -> Form:
        """Return `form` with the texts between prompt and answer. They begin where `prompt` differs from `head`, the
        rendering up to the answer."""
        at = _parting(prompt, head)
        unwritten, lead, instead = prompt[at:], head[at:], ""
        # sound if the texts differ only after the last turn, and only by marks, not by words such as another header
        sound = not unwritten or (turns[-1]["content"] in prompt[:at] and not MARK.sub("", lead).strip())
        others, moves = [turn for turn in turns if turn["role"] != "system"], False
        if not sound and not form.folds_system and 0 < len(others) < len(turns):
            inner = self(others, split, offered)
            moves = inner.sound and not inner.drops_answer
            moves = moves and prompt.endswith(inner.unwritten) and head.endswith(inner.lead)
            if moves:
                unwritten, lead, instead = inner.unwritten, inner.lead, inner.instead
        if unwritten and unwritten.endswith(lead):  # Granite's prompts have a thinking switch before their last mark
            instead, lead = lead, ""
        return dataclasses.replace(
            form, sound=sound, unwritten=unwritten, instead=instead, system_moves=moves, lead=lead
        )

    def _accepted(self, turns: Turns, split: str, offered: dict[str, Any]) -> tuple[Form, str, str]:
        """Return the first form in which the template keeps every text (if there is none, the first that it accepts).
        Also return the prompt and the rendering with an answer in that form."""
        folds = (False, True) if any(turn["role"] == "system" for turn in turns) else (False,)
        accepted, refused = [], []
        for form in (Form(folds_system=folds_system, parts=parts) for parts in (False, True) for folds_system in folds):
            try:
                prompt = self._template.text(form.given(turns), split, prompt=True, offered=offered)
                full_text = self._template.text(form.with_answer(turns, ANSWER), split, prompt=False, offered=offered)
            except Rejected as error:
                refused.append(error)
                continue
            accepted.append((form, prompt, full_text))
            texts = (turn["content"].strip() for turn in turns if "tool_calls" not in turn)
            # templates often drop the text of turns with calls
            complete = ANSWER in full_text and all(text in prompt for text in texts)
            if complete and not (form.parts and re.search(r"'text'|\"text\"", full_text)):  # it wrote the list as text
                return accepted[-1]
        if not accepted:
            raise refused[0]
        return accepted[0]

    def _with_thinking(self, form: Form, turns: Turns, prompt: str, split: str, offered: dict[str, Any]) -> Form:
        """Return `form` with the first `thinking_as` under which the template keeps a target's thinking."""
        begins = "" if form.system_moves else form.before_lead(prompt)
        in_field = form.with_answer(turns, ANSWER, _THOUGHT)
        try:
            field = self._template.text(in_field, split, prompt=False, offered=offered)
        except Rejected:
            field = ""
        match = re.fullmatch(f"(.*?){_THOUGHT}(.*?){ANSWER}.*", field[len(begins) :], re.S)
        if match and field.startswith(begins):
            before = "" if form.system_moves else match[1].strip()
            return dataclasses.replace(form, thinking_as="field", thinking_marks=(before, match[2].strip()))
        in_content = form.with_answer(turns, f"<think>{_THOUGHT}</think>{ANSWER}")
        full_text = self._template.text(in_content, split, prompt=False, offered=offered)
        rest = full_text[len(begins) :]
        twice = form.closing_mark and MARK.match(rest.lstrip())  # the prompt opened the block already
        is_written = full_text.startswith(begins) and _THOUGHT in rest and not twice
        return form if is_written else dataclasses.replace(form, thinking_as="written")

    def _warnings(self, form: Form, offered: dict[str, Any]) -> Iterator[str]:
        """Yield a line for each thing in the template that a user may want to change."""
        source = self._template.source_of(offered)
        if form.sound and MARK.sub("", form.lead).strip() and not re.search(_PROMPT_FLAG, source):
            header = one_line(form.lead)
            yield (
                f'{HEADER_LEARNT} "{header}"; end the template with '
                f"{{% if add_generation_prompt %}}{{{{ '{header}' }}}}{{% endif %}}"
            )
        for name in offered:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                giver = "tools()" if name == "tools" else "chat_template_kwargs"
                yield f"warning: the chat template does not use {name}, so prompts lack what {giver} gives"
            elif name in self._template.arguments:
                yield f"--thinking {self._thinking} replaces {name} of chat_template_kwargs"


def closing_mark(text: str) -> str | None:
    """Return the mark that closes the thinking block opened at a text's end; None if no block is opened there."""
    opening_mark = _OPENED.search(text)
    if not opening_mark:
        return None
    name = opening_mark["name"]
    if name is None:
        return "<channel|>"
    for opening, closing in (("START_", "END_"), ("begin_of", "end_of")):
        if opening in name:
            return opening_mark["bracket"] + name.replace(opening, closing) + opening_mark["end"]
    return f"{opening_mark['bracket']}/{name}{opening_mark['end']}"


def _own_system(prompt: str, first: str) -> str:
    """Return the beginning of a prompt's text before the `first` turn; "" if this is only a header of 1 or 2 words."""
    begin, written, _ = prompt.partition(first)
    own = " ".join(MARK.sub(" ", begin).split()).removeprefix("system ").removesuffix(" user")
    return one_line(own) if written and len(re.findall(r"[^\W\d_]+", own)) > 2 else ""


def _parting(prompt: str, head: str) -> int:
    """Return the position where two texts begin to differ; if a mark is there, the position where the mark begins."""
    at = common_length([prompt, head])
    for text in (prompt, head):
        at = next((mark.start() for mark in MARK.finditer(text) if mark.start() < at < mark.end()), at)
    return at


def _remarks(form: Form, turns: Turns) -> list[str]:
    """Return a line for each thing that the trainer does in addition to the template."""
    lines = []
    if form.folds_system:
        lines.append("chat template: it takes no system message, so the system text is put into the first user turn")
    if form.system_moves:
        lines.append("chat template: it moves the system message once an answer follows; the trainer keeps it in place")
    if form.unwritten and (form.sound or form.system_moves):
        lines.append(
            f'chat template: prompts end with "{one_line(form.unwritten)}", which the template leaves out once an '
            "answer follows; the trainer keeps this text before answers"
        )
    if form.prompt_end:
        lines.append(
            f'--thinking off: prompts open a thinking block; the trainer closes it with "{one_line(form.prompt_end)}"'
        )
    elif form.closing:
        lines.append(
            f'chat template: prompts open a block that answers do not close; "{one_line(form.closing)}" is learnt '
            "before an answer that has no thinking"
        )
    if form.thinking_as == "written":
        lines.append("--thinking keep: the chat template drops thinking; the trainer writes it after the prompt")
    if all(turn["role"] != "user" for turn in turns):
        roles = "/".join(turn["role"] for turn in turns)
        lines.append(f"warning: some chats have no user turn (roles {roles}); check that messages() intends this")
    return lines
