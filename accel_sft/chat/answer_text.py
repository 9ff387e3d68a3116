"""The text of generated answers that is scored: without thinking, and without what the template writes around it."""

import re
from collections.abc import Sequence

from accel_sft.chat.control_tokens import without_guards
from accel_sft.chat.conversation import Conversation, Turns
from accel_sft.chat.form import Form, wanted
from accel_sft.chat.rendering import Rendering
from accel_sft.chat.template import MARK


class AnswerText:
    """The text of a generated answer, without what the template writes around answers, thinking, and special tokens.

    Qwen3's template writes an empty thinking block before every answer, gpt-oss's names a channel, others break the
    line. Answers are learnt and generated with it, but tasks do not know of it. Under `--thinking keep` the target's
    own thinking is taken off too.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.rendering, self.control = rendering, rendering.control
        self._keeps = rendering.thinking == "keep"

    def __call__(self, chat: Conversation, answer: Sequence[int]) -> str:
        """The text to be scored.

        What the template and the tokenizer make of the target is read as the target, so an answer that is reproduced
        to the token is right where one of the two strips, moves or normalises a character.

        Args:
            answer: the generated token ids, end-of-turn included.
        """
        form, right = self._form(chat), wanted(chat, self.rendering.thinking)
        lead = self.rendering.lead(form)
        text = self._said(form, answer, lead, right)
        if text == right or chat.calls:
            return text
        expected = self._learnt(chat)
        if not expected:  # this tokenizer decodes the lead otherwise than the template writes it: it stays in the text
            return self._said(form, answer, "", right)
        return right if text == expected else text

    def expected(self, chat: Conversation) -> str:
        """The text of the right answer: its target or, where it calls tools, what the template writes of it."""
        return self._learnt(chat) if chat.calls else wanted(chat, self.rendering.thinking)

    def _learnt(self, chat: Conversation) -> str:
        (example,) = self.rendering.examples([chat], "validation")
        (ids,) = self.control.ids([example.rest or ""])
        form = self._form(chat)
        return self._said(form, ids, self.rendering.lead(form), wanted(chat, self.rendering.thinking))

    def _form(self, chat: Conversation) -> Form:
        return self.rendering.form(chat.turns, "validation", chat.tools)

    def said(self, turns: Turns, answer: Sequence[int]) -> str:
        """The text of an answer to which no right one is known."""
        form = self.rendering.form(turns, "prompt")
        return self._said(form, answer, self.rendering.lead(form), "")

    def _said(self, form: Form, answer: Sequence[int], lead: str, target: str) -> str:
        ids, special = list(answer), self.control.pattern
        while ids and ids[-1] in self.control.special_ids:
            ids.pop()
        text = _without_lead(self.control.text(ids), lead, target)
        if self._keeps:  # before special tokens go, which its marks may be
            text = _without_thinking(text, *form.thinking_marks)
        if end := special.search(form.tail):
            text = text.partition(end[0])[0]
        return without_guards(special.sub("", text.removesuffix(self.rendering.tail(form))))


def _without_thinking(text: str, before: str, behind: str) -> str:
    """An answer behind its thinking, which stands between the two; nothing is left of thinking without an end."""
    if behind and behind in text:
        return _behind_mark(text, behind, "")
    return "" if before and text.lstrip().startswith(before) else text


def _without_lead(text: str, lead: str, target: str) -> str:
    """A generated text from its answer on, whatever it has in the blocks that the template writes before an answer.

    Nothing is left of a text that opened such a block and did not come to its end.
    """
    marks = MARK.findall(lead)
    closing = next((mark for mark in reversed(marks) if mark[1] == "/"), None)
    if not marks:
        return text.removeprefix(lead)
    if closing and closing in target:  # the thinking is the task's own, to be scored
        return text.lstrip() if lead[0].isspace() else text
    # some tokenizers decode a blank behind a special token, where the template wrote none
    pieces = [piece for piece in re.split(rf"({MARK.pattern})|\s+", lead) if piece]
    core = re.search(r"\s*".join(map(re.escape, pieces)), text)
    if core:
        return _behind_mark(text, core[0], lead[len(lead.rstrip()) :])
    if closing and closing in text:
        return _behind_mark(text, closing, lead.rpartition(closing)[2])
    opened = marks[0] == closing or text.lstrip().startswith(marks[0])  # by the prompt, or by the text
    return "" if opened else text


def _behind_mark(text: str, mark: str, then: str) -> str:
    rest = text.partition(mark)[2]
    return rest[len(then) :] if rest.startswith(then) else rest.lstrip()
