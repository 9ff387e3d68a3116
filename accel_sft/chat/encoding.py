"""Turns messages and target into token ids and loss mask; drops, cuts or refuses rows longer than --max-length."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.answer_tokens import AnswerTokens
from accel_sft.chat.conversation import Conversation, conversation
from accel_sft.chat.image_inputs import ImageInputs, RowImages
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.chat.template import Rejected
from accel_sft.rows.row_file import more
from accel_sft.rows.rows import Rows

EMPTY_ANSWER = "left out: the answer is empty"
NOTHING_TO_LEARN = "left out: the tokenizer leaves nothing of the answer to learn"
NO_PROMPT = "left out: the chat template writes no prompt"
_SHOWN = 5
_PART_EXAMPLES, _PART_CHARACTERS = 512, 1 << 18
"""This many examples, or characters, are tokenized together, so that memory does not grow with the data."""


class Encoded(NamedTuple):
    """One example as token ids: its answer is generated from the first `prompt_length` ids, and the rest carry loss.

    If the task gives several turns to learn, `earlier` has begin and end of the answers within the prompt, which carry
    loss too. If the template writes earlier answers differently once others follow, the example becomes several rows
    with the same index, in order. The last id is the end-of-turn token unless the example was cut (`--truncation
    right`). `images` are the images whose placeholders are among the ids.
    """

    index: int
    input_ids: list[int]
    prompt_length: int
    earlier: tuple[tuple[int, int], ...] = ()
    images: RowImages | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each answer."""
        return (*self.earlier, (self.prompt_length, len(self.input_ids)))

    @property
    def learnt(self) -> list[range]:
        """Positions of the tokens that carry loss; a row's first token has none, as nothing precedes it."""
        return [range(max(begin, 1), end) for begin, end in self.spans]

    @property
    def answer_tokens(self) -> int:
        """Number of the last answer's tokens that carry loss."""
        return len(self.input_ids) - max(self.prompt_length, 1)

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return sum(map(len, self.learnt)) if self.earlier else self.answer_tokens


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides an example's tokens besides its text.

    Attributes:
        eos_ids: `end_of_turn_ids`; if the template ends answers with none of them, the tokenizer's eos is added.
        max_length: most tokens per example.
        truncation: "drop", "right" or "error": what happens to longer ones.
        thinking, day, control_tokens: as `Rendering` takes them.
    """

    eos_ids: frozenset[int]
    max_length: int
    truncation: str
    thinking: str = "template"
    day: str | None = None
    control_tokens: str = "text"

    @property
    def too_long(self) -> str:
        return f"left out: longer than --max-length {self.max_length}"


@dataclasses.dataclass
class Encoding:
    """The usable examples of a split, and the indices of those left out, by reason.

    Attributes:
        control_tokens: indices of kept examples with control tokens in their texts: in "answers" if one would end an
            answer, else in "texts".
        notes: lines about where the tokens come from.
        examples: the split's examples, which know file and line of those left out if they are Rows.
    """

    split: str
    kept: Sequence[Encoded] = dataclasses.field(default_factory=list)
    left_out: dict[str, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    cut: list[int] = dataclasses.field(default_factory=list)
    control_tokens: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {"answers": [], "texts": []})
    notes: list[str] = dataclasses.field(default_factory=list)
    examples: Sequence[Any] = ()

    def lines(self) -> list[str]:
        """The notes, and one line for each reason for which examples were left out or cut."""
        found = [
            *self.left_out.items(),
            ("cut to --max-length; their end, an end-of-turn token at least, is not learnt", self.cut),
        ]
        named = [
            f"{self.split}: {len(indices)} {reason} ({self._named(indices)})" for reason, indices in found if indices
        ]
        return [*self.notes, *named]

    def note(self, other: Encoding) -> None:
        """Add what was left out and cut in the next part of the split."""
        for reason, indices in other.left_out.items():
            self.left_out[reason] += indices
        self.cut += other.cut
        for where, indices in other.control_tokens.items():
            self.control_tokens[where] += indices

    def check(self, examples: int, rules: Rules) -> None:
        """Check that some of the split's examples are left, and under `--truncation error` that none is too long.

        Raises:
            UserError: the check failed; the lines say why.
        """
        if rules.truncation == "error" and rules.too_long in self.left_out:
            raise UserError(*self.lines(), "--truncation error stops here: raise --max-length, or choose drop or right")
        if sum(map(len, self.left_out.values())) == examples:
            raise UserError(*self.lines(), f"{self.split}: no example is left to use")

    def _named(self, indices: list[int]) -> str:
        first = indices[:_SHOWN]
        places = self.examples.places(first) if isinstance(self.examples, Rows) else first
        named = ", ".join(map(str, places)) + more(len(indices) - len(first))
        return named if isinstance(self.examples, Rows) else f"examples {named}"


def end_of_turn_ids(tokenizer: Any, generation_config: Any = None) -> set[int]:
    """Ids that end an answer: the tokenizer's eos and those the model's generation settings name."""
    named = getattr(generation_config, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return {token for token in ids if token is not None}


def encode_parts(
    rendering: Rendering,
    task: Task,
    examples: Sequence[Any],
    indices: Sequence[int],
    split: str,
    rules: Rules,
    images: ImageInputs | None = None,
) -> Iterator[Encoding]:
    """Render and tokenize some of a split's examples, a few at a time, and find where answers begin and end.

    Raises:
        UserError: the template rejects the messages, or drops or cuts an answer; the task returns something unusable;
            or the prompt does not begin the rendering with an answer.
    """
    tokens = AnswerTokens(rendering, rules.eos_ids, images)
    waiting: list[tuple[int, Conversation]] = []
    characters = 0
    for index in indices:
        chat = conversation(task, examples, split, index)
        waiting.append((index, chat))
        characters += sum(len(text) for each in chat.each() for text in each.texts())
        if len(waiting) == _PART_EXAMPLES or characters >= _PART_CHARACTERS or index == indices[-1]:
            yield _encode_part(tokens, waiting, split, rules)
            waiting, characters = [], 0


def _encode_part(tokens: AnswerTokens, part: list[tuple[int, Conversation]], split: str, rules: Rules) -> Encoding:
    cuts = rules.truncation == "right"
    far_too_long = {index for index, chat in part if not cuts and tokens.exceeds(chat, rules.max_length)}
    part = [(index, chat) for index, chat in part if index not in far_too_long]
    every = [each for _, chat in part for each in chat.each()]
    counts = [len(chat.learnt) + 1 for _, chat in part]
    texts = tokens.with_images(_rendered(tokens.rendering, part, every, split), part, split)
    answers = zip(every, texts, tokens.of_texts(texts, counts), strict=True)
    kept: list[Encoded] = []
    result = Encoding(split, kept)
    for (index, chat), count in zip(part, counts, strict=True):
        its = list(itertools.islice(answers, count))
        if any(tokens.is_empty(each) for each, *_ in its):
            result.left_out[EMPTY_ANSWER].append(index)
            continue
        rows: list[Encoded] = []
        for each, text, (prompt, whole) in its:
            ids = tokens.ids(split, index, each, text, prompt, whole)
            _append(rows, Encoded(index, ids, len(prompt), images=tokens.images_of(each)))
        short = _limited(rows, split, rules)
        if not short:
            result.left_out[rules.too_long].append(index)
        elif not all(row.input_ids[begin : end - 1] for row in rows for begin, end in row.spans):  # beside its end
            result.left_out[NOTHING_TO_LEARN].append(index)
        elif not all(row.spans[0][0] for row in rows):
            result.left_out[NO_PROMPT].append(index)
        else:
            kept += short
            if written := tokens.control_token(chat):
                result.control_tokens["answers" if written.ends_answer else "texts"].append(index)
            if short != rows:
                result.cut.append(index)
    if far_too_long:
        result.left_out[rules.too_long] = sorted({*result.left_out[rules.too_long], *far_too_long})
    return result


def _rendered(
    rendering: Rendering, part: list[tuple[int, Conversation]], every: list[Conversation], split: str
) -> list[Rendered]:
    """All conversations as text. Raises the error of the first example that the template rejects."""
    try:
        return rendering.examples(every, split)
    except Rejected:
        for index, chat in part:
            try:
                rendering.examples(chat.each(), split)
            except Rejected as error:
                raise Rejected(f"{split} example {index}: {str(error).removeprefix(f'{split}: ')}") from error
        raise


def _append(rows: list[Encoded], row: Encoded) -> None:
    """Add the next answer of a conversation to its rows: to the last row, if the answer's prompt begins with that row.

    If not, the template writes earlier answers differently once others follow. No single row then contains what both
    answers are generated from, and the answer gets a row of its own.
    """
    before = rows[-1] if rows else None
    if before and row.input_ids[: min(len(before.input_ids), row.prompt_length)] == before.input_ids:
        rows[-1] = row._replace(earlier=before.spans)
    else:
        rows.append(row)


def _limited(rows: list[Encoded], split: str, rules: Rules) -> list[Encoded]:
    """An example's rows, cut to `--max-length` where that is allowed; none if the example is to be left out."""
    if all(len(row.input_ids) <= rules.max_length for row in rows):
        return rows
    cuts = rules.truncation == "right" and not any(row.images for row in rows)  # an image's placeholders cannot be cut
    kept = [row for row in (_cut(row, rules.max_length) for row in rows) if row] if cuts else []
    # in an evaluation the last answer is generated: it needs its prompt
    if kept and split != "train" and kept[-1].prompt_length != rows[-1].prompt_length:
        return []
    return kept


def _cut(row: Encoded, length: int) -> Encoded | None:
    """A row's first tokens, up to the last that carries loss; None if none does."""
    spans = [(begin, min(end, length)) for begin, end in row.spans if begin < length]
    if not spans:
        return None
    *earlier, (begin, end) = spans
    return row._replace(input_ids=row.input_ids[:end], prompt_length=begin, earlier=tuple(earlier))
