"""Turns a task's examples into rows of token ids, part by part; leaves out, cuts or refuses rows that are too long. Raw
text, which no chat template writes, becomes windows."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.answer_tokens import AnswerTokens
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import Conversation, conversation, wanted
from accel_sft.chat.encoded import (
    EMPTY_ANSWER,
    EQUAL_ANSWERS,
    NO_PROMPT,
    NO_REJECTED,
    NOTHING_TO_LEARN,
    Encoded,
    Encoding,
    Pair,
    Rules,
)
from accel_sft.chat.image_inputs import GivenImages, ImageInputs, RowImages
from accel_sft.chat.pictures import Picture
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.chat.template import Rejected

_PART_EXAMPLES, _PART_CHARACTERS = 512, 1 << 18
"""Examples are tokenized in parts of at most this many examples, or about this many characters, to save memory."""
_EDGE = 32
"""Width and height of a blank image in pixels. Processors enlarge an image that is too small for them."""
Part = list[tuple[int, Conversation]]
"""Examples of a split: the index and the conversation of each."""
Answer = tuple[Conversation, Rendered, tuple[list[int], list[int]]]
"""The conversation that ends with an answer, its texts, the prompt's tokens, and those of prompt and answer."""
OnRefused = Callable[[int, UserError], None]
"""A function that is called with the index of an example that cannot be encoded, and the reason."""


def encode_parts(
    rendering: Rendering,
    task: Task,
    examples: Sequence[Any],
    indices: Sequence[int],
    split: str,
    rules: Rules,
    images: ImageInputs | None = None,
    on_refused: OnRefused | None = None,
) -> Iterator[Encoding]:
    """Render and tokenize some of a split's examples, a few at a time, and find where answers begin and end. If
    an example cannot be encoded, raise UserError; with `on_refused`, call it and leave the example out."""
    encoder = _Encoder(rendering, AnswerTokens(rendering, rules.eos_ids), split, rules, images)
    for part in _parts(task, examples, indices, split, on_refused):
        try:
            yield encoder.encoded(part)
        except UserError:  # encode each example alone, to leave out only those that fail
            if on_refused is None:
                raise
            for one in part:
                try:
                    yield encoder.encoded([one])
                except UserError as error:
                    on_refused(one[0], error)


def _parts(
    task: Task, examples: Sequence[Any], indices: Sequence[int], split: str, on_refused: OnRefused | None
) -> Iterator[Part]:
    part, characters = Part(), 0
    for index in indices:
        try:
            chat = conversation(task, examples, split, index)
        except UserError as error:
            if on_refused is None:
                raise
            on_refused(index, error)
            continue
        part.append((index, chat))
        characters += (len(chat.learnt) + 1) * sum(map(len, chat.texts()))  # answers are tokenized with their prompts
        if len(part) == _PART_EXAMPLES or characters >= _PART_CHARACTERS:
            yield part
            part, characters = Part(), 0
    if part:
        yield part


@dataclasses.dataclass
class _Encoder:
    rendering: Rendering
    tokens: AnswerTokens
    split: str
    rules: Rules
    images: ImageInputs | None

    def encoded(self, part: Part) -> Encoding:
        """Return the rows of some examples, and the indices of examples that were left out or cut."""
        written = [self._written(chat) for _, chat in part]
        answers = self._answers(
            [(index, chat) for (index, _), chats in zip(part, written, strict=True) for chat in chats]
        )
        control, encoded_rows = self.rendering.control, list[Encoded]()
        result, ends = Encoding(self.split, encoded_rows), control.spelled(self.rules.eos_ids)
        for (index, chat), chats in zip(part, written, strict=True):
            if chats:
                rows_of = [self._rows(index, [*itertools.islice(answers, len(one.learnt) + 1)]) for one in chats]
                short_of = [_limited(rows, self.split, self.rules) for rows in rows_of]
                rows, short = ([*itertools.chain(*every)] if all(every) else [] for every in (rows_of, short_of))
            else:
                rows = short = [] if self.rules.pairs else self._windows(index, chat.target)
            if reason := self._left_out(chat, rows, short):
                result.left_out[reason].append(index)
                continue
            encoded_rows += [_pair(short, self._name(index))] if self.rules.pairs else short
            if chat.rejected and not self.rules.pairs:
                result.unpaired.append(index)
            result.raw += not chat.turns or self.rendering.template.concatenates  # concatenated turns are raw text, too
            if not chat.turns and len(rows) > 1:
                result.windowed.append(index)
            if short != rows:
                result.cut.append(index)
            if (chat.turns or control.as_text) and (where := _written_where(control, chats or [chat], ends)):
                result.control_tokens[where].append(index)
        return result

    def _written(self, chat: Conversation) -> list[Conversation]:
        """Return the conversations that become an example's rows: one, or the two of a pair; [] for raw text, and for a
        pair without a rejected answer."""
        if not chat.turns or not self.rules.pairs:
            return [chat] if chat.turns else []
        return [chat, chat._replace(answer=chat.rejected)] if chat.rejected else []

    def _left_out(self, chat: Conversation, rows: list[Encoded], short: list[Encoded]) -> str | None:
        """Return why an example is left out, or None if it is kept; `short` are its `rows`, cut to `--max-length`."""
        if self.rules.pairs and not (chat.turns and chat.rejected):
            return NO_REJECTED
        if not rows:
            return NOTHING_TO_LEARN if not chat.turns and chat.target.strip() else EMPTY_ANSWER
        if not short:
            return self.rules.too_long
        if chat.turns and not all(row.input_ids[begin : end - 1] for row in rows for begin, end in row.spans):
            return NOTHING_TO_LEARN  # an answer has only its end token
        if not all(row.spans[0][0] for row in rows):
            return NO_PROMPT
        return EQUAL_ANSWERS if self.rules.pairs and short[0].input_ids == short[1].input_ids else None

    def _windows(self, index: int, text: str) -> list[Encoded]:
        """Return a text and the tokenizer's eos as rows of at most `--max-length` tokens; [] for a blank text. Each row
        begins with the last token of the row before, so that each token except the text's first is learnt once."""
        begin, ids, most = self.rendering.begin, self.rendering.text_ids(text), self.rules.max_length
        if not text.strip() or not ids:
            return []
        end = [self.tokens.tokenizer.eos_token_id]
        if not self.rendering.control.as_text:  # the text itself may begin with bos and end with eos
            begin = [] if ids[: len(begin)] == begin else begin
            last = self.rendering.text_ids(text.rstrip())
            if last[-1:] and last[-1] in self.rules.eos_ids:
                ids, end = last, []
        exception = "" if self.rendering.begin else ", except a text's first token, as nothing precedes it"
        eos = self.tokens.tokenizer.eos_token
        self.rendering.add_note(f"raw text: every token, and {eos} after the text, is learnt{exception}")
        ids = [*begin, *ids, *end]
        starts = range(0, len(ids) - 1, most - 1)
        return [Encoded(index, ids[at : at + most], 1 if at else max(len(begin), 1)) for at in starts]

    def _answers(self, chats: Part) -> Iterator[Answer]:
        """Yield for each answer of the chats: the conversation that ends with the answer, its texts, and its tokens."""
        every = [(index, answer) for index, chat in chats for answer in chat.by_answer()]
        texts = self._rendered(chats, [answer for _, answer in every])
        if images := self.images:
            pairs = zip(every, texts, strict=True)
            texts = [images.expanded(answer, text, self._name(index)) for (index, answer), text in pairs]
        tokens = self.tokens.of_texts(texts, [len(chat.learnt) + 1 for _, chat in chats])
        return zip((answer for _, answer in every), texts, tokens, strict=True)

    def _rows(self, index: int, answers: list[Answer]) -> list[Encoded]:
        """Return the rows of the example that has these answers; [] if one of the answers is empty."""
        rows: list[Encoded] = []
        thinking = self.rendering.thinking
        if not all(wanted(answer, thinking).strip() or answer.calls for answer, *_ in answers):
            return []
        for answer, text, (prompt, all_ids) in answers:
            ids = self.tokens.ids(self._name(index), answer, text, prompt, all_ids)
            images = self.images.row(index, answer) if self.images else None
            _append(rows, Encoded(index, ids, len(prompt), images=images))
        return rows

    def _rendered(self, part: Part, every: list[Conversation]) -> list[Rendered]:
        """Render all conversations as text; raise the error of the first example that the template rejects."""
        try:
            return self.rendering.examples(every, self.split)
        except Rejected:
            for index, chat in part:
                try:
                    self.rendering.examples(chat.by_answer(), self.split)
                except Rejected as error:
                    raise Rejected(f"{self._name(index)}: {str(error).removeprefix(f'{self.split}: ')}") from error
            raise

    def _name(self, index: int) -> str:
        return f"{self.split} example {index}"


def _append(rows: list[Encoded], row: Encoded) -> None:
    """Add the next answer of a conversation to its last row, if the answer's prompt begins with that row. If not (the
    template writes earlier answers differently once other turns follow), the answer gets a row of its own."""
    before = rows[-1] if rows else None
    if before and row.input_ids[: min(len(before.input_ids), row.prompt_length)] == before.input_ids:
        rows[-1] = row._replace(earlier=before.spans)
    else:
        rows.append(row)


def _pair(rows: list[Encoded], where: str) -> Pair:
    """Join the two rows of a prompt with its answers, the chosen one first."""
    chosen, rejected = rows
    prompt = chosen.prompt_length
    if rejected.input_ids[: rejected.prompt_length] != chosen.input_ids[:prompt]:
        raise UserError(f"{where}: the chat template writes another prompt before the rejected answer; change it")
    ids = chosen.input_ids + rejected.input_ids[prompt:]
    return Pair(chosen.index, ids, len(chosen.input_ids), ((prompt, len(chosen.input_ids)),))


def _written_where(control: ControlTokens, chats: list[Conversation], ends: Collection[str]) -> str | None:
    """Return the `written` of an example's conversations, "answers" before "texts"."""
    return min(filter(None, (control.written(chat, ends) for chat in chats)), default=None)


def _limited(rows: list[Encoded], split: str, rules: Rules) -> list[Encoded]:
    """Return an example's rows, cut to `--max-length` where that is allowed; [] if the example is to be left out."""
    if all(len(row.input_ids) <= rules.max_length for row in rows):
        return rows
    cuts = rules.truncation == "right" and not any(row.images for row in rows)  # an image's placeholders cannot be cut
    cut_rows = [row for row in (_cut(row, rules.max_length) for row in rows) if row] if cuts else []
    # an evaluation generates the last answer, and needs all of that answer's prompt
    if cut_rows and split != "train" and cut_rows[-1].prompt_length != rows[-1].prompt_length:
        return []
    return cut_rows


def _cut(row: Encoded, length: int) -> Encoded | None:
    """Cut a row after the last of its first `length` tokens that carries loss; return None if no such token exists."""
    spans = [(begin, min(end, length)) for begin, end in row.spans if begin < length]
    if not spans:
        return None
    *earlier, (begin, end) = spans
    return row._replace(input_ids=row.input_ids[:end], prompt_length=begin, earlier=tuple(earlier))


def blank_row(inputs: ImageInputs) -> Encoded:
    """Return a row with a white image and nothing to learn; with it, all ranks run the vision tower in every step."""
    import PIL.Image

    picture = Picture(PIL.Image.new("RGB", (_EDGE, _EDGE), "white"))
    images = RowImages(-1, 1, b"", GivenImages(inputs, (picture,), "a blank image"))
    ids = inputs.ids(images)
    return Encoded(-1, ids, len(ids), images=images)
