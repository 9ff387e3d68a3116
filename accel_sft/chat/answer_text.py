"""Extracts the text to score from a generated answer: removes what the template writes around answers."""

import re
from collections.abc import Sequence

from accel_sft.chat.control_tokens import without_guards
from accel_sft.chat.conversation import Conversation, Tools, Turns, wanted
from accel_sft.chat.form import Form
from accel_sft.chat.rendering import Rendering
from accel_sft.chat.template import MARK


class AnswerText:
    """Extracts the text of a generated answer, without special tokens and without what the template writes around it.

    Qwen3's template writes an empty thinking block before every answer, gpt-oss's template names a channel, and others
    write a line break. A model learns and generates these texts, but the task's targets lack them. Under `--thinking
    keep`, the thinking that the model learnt from targets is removed too.
    """

    def __init__(self, rendering: Rendering) -> None:
        self.rendering, self.control = rendering, rendering.control
        self._keeps = rendering.thinking == "keep"

    def __call__(self, chat: Conversation, answer: Sequence[int]) -> str:
        """Return the text of a generated answer for scoring; the token ids `answer` include those that end the turn.

        If the answer equals what the template and the tokenizer make of the target, return the target itself: such an
        answer is right even if the template or the tokenizer strips, moves or normalizes a character.
        """
        form = self.rendering.form(chat.turns, "validation", chat.offered)
        right = wanted(chat, self.rendering.thinking)
        text = self._text(form, answer, form.learnt_lead, right)
        if text == right or chat.calls:
            return text
        expected = self._learnt(chat)
        if not expected:  # decoding changed what the template writes before answers: it stays in the text
            return self._text(form, answer, "", right)
        return right if text == expected else text

    def expected(self, chat: Conversation) -> str:
        """Return the right answer's text: the target's scored part or, for an answer with tool calls, its rendering."""
        return self._learnt(chat) if chat.calls else wanted(chat, self.rendering.thinking)

    def _learnt(self, chat: Conversation) -> str:
        (example,) = self.rendering.examples([chat], "validation")
        (ids,) = self.control.ids([example.rest])
        return self._text(example.form, ids, example.form.learnt_lead, wanted(chat, self.rendering.thinking))

    def of_reply(self, turns: Turns, answer: Sequence[int], tools: Tools = None) -> str:
        """Return the text of an answer that was generated for turns whose right answer is unknown."""
        form = self.rendering.form(turns, "prompt", {"tools": tools} if tools else None)
        return self._text(form, answer, form.learnt_lead, "")

    def _text(self, form: Form, answer: Sequence[int], lead: str, target: str) -> str:
        ids, special = list(answer), self.control.pattern
        while ids and ids[-1] in self.control.special_ids:
            ids.pop()
        text = _without_lead(self.control.text(ids), lead, target)
        if self._keeps:  # before special tokens are removed: the marks of thinking may be special tokens
            text = _without_thinking(text, *form.thinking_marks)
        if end := special.search(form.tail):
            text = text.partition(end[0])[0]
        return without_guards(special.sub("", text.removesuffix(self.rendering.tail(form))))


def without_thinking(text: str, target: str) -> str:
    """Return a server's answer, without thinking unless `target` has thinking; "" if the thinking has no end."""
    return _without_lead(text, "<think></think>", target)


def _without_thinking(text: str, before: str, behind: str) -> str:
    """Return the answer after its thinking, which stands between two marks; "" if the thinking has no end."""
    if behind and behind in text:
        return _behind_mark(text, behind, "")
    return "" if before and text.lstrip().startswith(before) else text


def _without_lead(text: str, lead: str, target: str) -> str:
    """Return a generated text without the blocks that the template writes before answers, whatever the blocks contain;
    "" if the text opens such a block and does not close it."""
    marks = MARK.findall(lead)
    closing = next((mark for mark in reversed(marks) if mark[1] == "/"), None)
    if not marks:
        return text.removeprefix(lead)
    if closing and closing in target:  # the task's target contains thinking, so thinking is scored
        return text.lstrip() if lead[0].isspace() else text
    # after a special token, some tokenizers decode a space that the template did not write
    pieces = [piece for piece in re.split(rf"({MARK.pattern})|\s+", lead) if piece]
    core = re.search(r"\s*".join(map(re.escape, pieces)), text)
    if core:
        return _behind_mark(text, core[0], lead[len(lead.rstrip()) :])
    if closing and closing in text:
        return _behind_mark(text, closing, lead.rpartition(closing)[2])
    opened = marks[0] == closing or text.lstrip().startswith(marks[0])  # the prompt opened a block, or the text did
    return "" if opened else text


def _behind_mark(text: str, mark: str, then: str) -> str:
    rest = text.partition(mark)[2]
    return rest[len(then) :] if rest.startswith(then) else rest.lstrip()
