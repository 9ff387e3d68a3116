"""Renders each conversation as two texts: the prompt, and the answer that is learnt after it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import Conversation, Tools, Turns, divided
from accel_sft.chat.form import ANSWER, Form, Forms
from accel_sft.chat.pictures import Picture, parted
from accel_sft.chat.template import ChatTemplate

_ARGUMENTS = {"of": "a call"}
_CALL: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": _ARGUMENTS}}


class Rendered(NamedTuple):
    """A conversation as text: the `prompt`, from which generation starts, and the `rest`, which is learnt after it.

    Attributes:
        full_text: the template's own rendering of prompt and answer, for messages.
        form: the conversation's form.
        apart: whether the text with the answer begins otherwise than the prompt; if so, `rest` is empty.
    """

    prompt: str
    rest: str
    full_text: str
    form: Form
    apart: bool = False


class Rendering:
    """Renders conversations with a tokenizer's chat template, in the same way in training and evaluation. `--thinking`,
    the day (YYYY-MM-DD) and `--control-tokens` are fixed.

    `notes` has lines for the log: what is added to the template's text, and warnings.
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
        self.template = ChatTemplate(self.control, self.thinking, day)
        self.form = Forms(self.template, self.thinking, self.add_note)
        self.notes: list[str] = []

    def add_note(self, line: str) -> None:
        """Add a line to `notes`, once."""
        if line not in self.notes:
            self.notes.append(line)

    def prompt(self, turns: Turns, images: Sequence[Picture] = (), tools: Tools = None) -> str:
        """Return the prompt of a conversation whose answer is unknown, as guarded text for `control.ids`."""
        chat = self.control.guarded(Conversation(turns, {"role": "assistant", "content": ""}, tools=tools))
        self.template.check([turn["role"] for turn in turns] == ["user"] and not tools)
        form = self.form(turns, "prompt", chat.offered)
        given = parted(form.given(chat.turns), images)
        return self.template.text(given, "prompt", prompt=True, offered=chat.offered) + form.prompt_end

    def examples(self, chats: Sequence[Conversation], split: str) -> list[Rendered]:
        """Return each conversation's prompt and the answer learnt after it, as guarded texts for `control.ids`."""
        self.template.check(all(chat.continued for chat in chats))
        if chats and self.template.concatenates:
            written = f"answers follow prompts directly and end with {self.tokenizer.eos_token}"
            self.add_note(f"no chat template: {written}; for conversations, add --chat-template chatml")
        chats = [self.control.guarded(chat) for chat in chats]
        forms = [self.form(chat.turns, split, chat.offered) for chat in chats]
        for own in {form.own_system for form in forms} - {""}:
            self.add_note(f'chat template: rows without a system prompt get that of the template: "{own}"')
        offered, both = [chat.offered for chat in chats], list(zip(forms, chats, strict=True))
        given = [parted(form.given(chat.turns), chat.images) for form, chat in both]
        prompts = self.template.texts(given, offered, split, prompt=True)
        full = [parted(self._with_answer(form, chat), chat.images) for form, chat in both]
        full_texts = self.template.texts(full, offered, split, prompt=False)
        moved = [at for at, form in enumerate(forms) if form.system_moves]
        probes = [parted(forms[at].with_answer(chats[at].turns, ANSWER), chats[at].images) for at in moved]
        probed = self.template.texts(probes, [offered[at] for at in moved], split, prompt=False)
        heads = {at: text.partition(ANSWER)[0] for at, text in zip(moved, probed, strict=True)}
        return [_joined(form, chat, prompts[at], full_texts[at], heads.get(at)) for at, (form, chat) in enumerate(both)]

    def _with_answer(self, form: Form, chat: Conversation) -> Turns:
        """Return the conversation with its answer, as the template takes them."""
        answer, thinking = chat.answer["content"], chat.answer.get("reasoning_content")
        if self.thinking == "keep":
            thinking, answer = divided(chat) if form.thinking_as == "field" else (None, chat.target)
        more = {name: value for name, value in chat.answer.items() if name not in ("content", "reasoning_content")}
        return form.with_answer(chat.turns, answer, thinking, more)

    @property
    def begin(self) -> list[int]:
        """Tokens that the tokenizer itself puts before a text: its bos, or nothing."""
        return self.control.begin

    def text_ids(self, text: str) -> list[int]:
        """Return the tokens of raw text (not written by a template), without `begin`."""
        return self.control.ids([self.control.guarded(Conversation([], {"role": "text", "content": text})).target])[0]

    def ends(self) -> list[int]:
        """Return the special tokens that the template writes after an answer; [] if there is no template, or it fails.

        Tokens that also end a user's turn come first, then those that only end answers (`</answer>`), in reverse order.
        """
        if self.template.concatenates:
            return []
        turns = [{"role": "user", "content": "?"}]
        try:
            tails = self.prompt(turns).rpartition("?")[2], self.form(turns, "prompt").tail
        except UserError:  # the task's messages, encoded next, may pass; if not, their error says why
            return []
        written = {match[0] for tail in tails for match in self.control.pattern.finditer(tail)}
        question_ends, answer_ends = (
            [token for token in ids if self.tokenizer.decode([token]) in written] for ids in self.control.ids(tails)
        )
        return sorted(answer_ends, key=[*question_ends, *answer_ends[::-1]].index)

    def call_ends(self) -> list[int]:
        """Return the special tokens after a turn's last tool call if the last of them, such as `<|call|>`, ends the
        turn (two calls have it only once), not each call. Return [] otherwise, and if the template takes no calls."""
        for calls in () if self.template.concatenates else ([_CALL, _CALL], [_CALL]):
            turns: Turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
            try:
                text = self.template.text(turns, "prompt", prompt=False, offered={"tools": []})
            except UserError:  # some templates take only one call
                continue
            _, called, tail = text.rpartition(_ARGUMENTS["of"])
            marks = [match[0] for match in self.control.pattern.finditer(tail)]
            if called and marks and text.rpartition("?")[2].count(marks[-1]) == 1:
                return [token for ids in self.control.ids(marks) for token in ids]
            return []
        return []

    def tail(self, form: Form) -> str:
        """Return the plain text that the template writes after an answer, up to the first control token."""
        end = self.control.pattern.search(form.tail)
        return form.tail[: end.start()] if end else form.tail


def _joined(form: Form, chat: Conversation, prompt: str, full_text: str, head: str | None) -> Rendered:
    """Return `prompt`, and what follows it in `full_text`; `head` is that of `Form.rest_of`."""
    thinking, answer = divided(chat) if form.thinking_as == "written" else (None, "")
    if thinking is not None and (form.sound or form.system_moves):
        opening, mark = ("", form.closing_mark) if form.closing_mark else ("<think>", "</think>")
        return Rendered(prompt, f"{opening}{thinking}{mark}{answer}{form.tail}", full_text, form)
    rest = form.rest_of(full_text, prompt, head)
    if rest is None:
        return Rendered(prompt, "", full_text, form, apart=True)
    return Rendered(prompt + form.prompt_end, rest, full_text, form)
