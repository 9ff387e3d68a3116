"""Extracts from a generated answer the text that is scored, without what the template writes around answers."""

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
    line. Answers are learnt and generated with these, but tasks do not know them. Under `--thinking keep` the target's
    own thinking is removed too.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.rendering, self.control = rendering, rendering.control
        self._keeps = rendering.thinking == "keep"

    def __call__(self, chat: Conversation, answer: Sequence[int]) -> str:
        """The text to be scored.

        An answer equal to what the template and the tokenizer make of the target is returned as the target itself: it
        is right even if one of the two strips, moves or normalises a character.

        Args:
            answer: the generated token ids, end-of-turn included.
        """
        form, right = self._form(chat), wanted(chat, self.rendering.thinking)
        lead = self.rendering.lead(form)
        text = self._said(form, answer, lead, right)
        if text == right or chat.calls:
            return text
        expected = self._learnt(chat)
        if not expected:  # this tokenizer does not decode the lead as the template writes it: it stays in the text
            return self._said(form, answer, "", right)
        return right if text == expected else text

    def expected(self, chat: Conversation) -> str:
        """The text of the right answer: its target or, if it calls tools, what the template writes for it."""
        return self._learnt(chat) if chat.calls else wanted(chat, self.rendering.thinking)

    def _learnt(self, chat: Conversation) -> str:
        (example,) = self.rendering.examples([chat], "validation")
        (ids,) = self.control.ids([example.rest or ""])
        form = self._form(chat)
        return self._said(form, ids, self.rendering.lead(form), wanted(chat, self.rendering.thinking))

    def _form(self, chat: Conversation) -> Form:
        return self.rendering.form(chat.turns, "validation", chat.tools)

    def said(self, turns: Turns, answer: Sequence[int]) -> str:
        """The text of a generated answer whose right answer is unknown."""
        form = self.rendering.form(turns, "prompt")
        return self._said(form, answer, self.rendering.lead(form), "")

    def _said(self, form: Form, answer: Sequence[int], lead: str, target: str) -> str:
        ids, special = list(answer), self.control.pattern
        while ids and ids[-1] in self.control.special_ids:
            ids.pop()
        text = _without_lead(self.control.text(ids), lead, target)
        if self._keeps:  # before special tokens are removed: its marks may be such tokens
            text = _without_thinking(text, *form.thinking_marks)
        if end := special.search(form.tail):
            text = text.partition(end[0])[0]
        return without_guards(special.sub("", text.removesuffix(self.rendering.tail(form))))


def _without_thinking(text: str, before: str, behind: str) -> str:
    """The answer after its thinking, which the marks `before` and `behind` enclose; "" if the thinking has no end."""
    if behind and behind in text:
        return _behind_mark(text, behind, "")
    return "" if before and text.lstrip().startswith(before) else text


def _without_lead(text: str, lead: str, target: str) -> str:
    """A generated text without the blocks that the template writes before an answer, whatever it has in them.

    The result is "" if the text opened such a block and did not close it.
    """
    marks = MARK.findall(lead)
    closing = next((mark for mark in reversed(marks) if mark[1] == "/"), None)
    if not marks:
        return text.removeprefix(lead)
    if closing and closing in target:  # the thinking is the task's own, to be scored
        return text.lstrip() if lead[0].isspace() else text
    # some tokenizers decode a blank after a special token that the template did not write
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
