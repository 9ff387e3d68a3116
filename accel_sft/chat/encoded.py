"""Holds encoded examples: rows of token ids with the spans that carry loss, and which examples were left out or cut."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.chat.image_inputs import RowImages
from accel_sft.rows.row_file import more
from accel_sft.rows.rows import Rows

EMPTY_ANSWER = "left out: the answer is empty"
NOTHING_TO_LEARN = "left out: the tokenizer leaves nothing of the answer to learn"
NO_PROMPT = "left out: the chat template writes no prompt"
NO_REJECTED = "left out: without a rejected answer, which --loss dpo needs"
UNPAIRED = "a rejected answer is not learnt; add --loss dpo, or for the chosen alone (chat) --columns completion=chosen"
EQUAL_ANSWERS = "left out: the chosen and the rejected answer are equal"
_SHOWN = 5


class Encoded(NamedTuple):
    """One example as token ids: the first `prompt_length` ids are the prompt, and the others, the answer, carry loss.

    If several turns are learnt, `earlier` has the begin and end of each answer within the prompt; these answers carry
    loss too. If the template writes earlier answers differently once other turns follow, the example becomes several
    rows with the same index, in order. The last id is the end-of-turn token, except in rows that `--truncation right`
    cut. Raw text becomes windows, rows that overlap by one token. `images` have their placeholders among the ids.
    """

    index: int  # type: ignore[assignment]  # in place of a tuple's method
    input_ids: list[int]
    prompt_length: int
    earlier: tuple[tuple[int, int], ...] = ()
    images: RowImages | None = None

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Begin and end of each answer."""
        return (*self.earlier, (self.prompt_length, len(self.input_ids)))

    @property
    def sequences(self) -> tuple[Encoded, ...]:
        """What a model without knowledge of pairs reads: this row."""
        return (self,)

    @property
    def learnt(self) -> list[range]:
        """Positions of the tokens that carry loss; a row's first token carries none, as nothing precedes it."""
        return [range(max(begin, 1), end) for begin, end in self.spans]

    @property
    def answer_tokens(self) -> int:
        """Number of the last answer's tokens that carry loss."""
        return len(self.input_ids) - max(self.prompt_length, 1)

    @property
    def supervised_tokens(self) -> int:
        """Number of tokens that carry loss."""
        return sum(map(len, self.learnt)) if self.earlier else self.answer_tokens


class Pair(Encoded):
    """A prompt and two answers to it: its ids are the prompt, the chosen answer (which is `earlier`) and the rejected
    answer. The rejected answer follows the prompt, too: it does not see the chosen one."""

    __slots__ = ()

    @property
    def forks_at(self) -> int:
        """Number of the prompt's tokens."""
        return self.earlier[0][0]

    @property
    def sequences(self) -> tuple[Encoded, ...]:
        """The prompt with the chosen answer, and the prompt with the rejected answer."""
        prompt, begin = self.forks_at, self.prompt_length
        rejected = [*self.input_ids[:prompt], *self.input_ids[begin:]]
        return Encoded(self.index, self.input_ids[:begin], prompt), Encoded(self.index, rejected, prompt)


def sequences(rows: Sequence[Encoded]) -> list[Encoded]:
    """The `sequences` of all rows, in order."""
    return [sequence for row in rows for sequence in row.sequences]


@dataclasses.dataclass(frozen=True)
class Rules:
    """What decides an example's tokens apart from its text: options, and two sets of end tokens.

    Attributes:
        eos_ids: `end_of_turn_ids`, and the token that ends the template's turns; if the template ends answers with none
            of them, answers get the tokenizer's eos.
        served_ends: those of `eos_ids` that the model's own generation settings name.
        pairs: whether examples become pairs, with their rejected answers.
    """

    eos_ids: frozenset[int]
    max_length: int
    truncation: str
    thinking: str = "template"
    day: str | None = None
    control_tokens: str = "text"
    served_ends: frozenset[int] = frozenset()
    pairs: bool = False

    @property
    def too_long(self) -> str:
        return f"left out: longer than --max-length {self.max_length}"


@dataclasses.dataclass
class Encoding:
    """The usable examples of a split and, for each reason, the indices of examples that were left out.

    Attributes:
        raw: number of kept examples that are raw text.
        windowed: indices of raw texts that make several rows.
        unpaired: indices of kept examples whose rejected answer is not among the rows.
        control_tokens: indices of kept examples whose texts contain control tokens: under "answers" if such a token
            would end an answer, else under "texts".
        notes: lines about how texts became tokens.
        examples: the split's examples; if these are Rows, `lines()` names examples by file and line.
    """

    split: str
    kept: Sequence[Encoded] = dataclasses.field(default_factory=list)
    left_out: dict[str, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    cut: list[int] = dataclasses.field(default_factory=list)
    raw: int = 0
    windowed: list[int] = dataclasses.field(default_factory=list)
    unpaired: list[int] = dataclasses.field(default_factory=list)
    control_tokens: dict[str, list[int]] = dataclasses.field(default_factory=lambda: {"answers": [], "texts": []})
    notes: list[str] = dataclasses.field(default_factory=list)
    examples: Sequence[Any] = ()

    def lines(self) -> list[str]:
        """The notes, and one line for each reason why examples were left out or cut."""
        cut = "cut to --max-length; their end (at least the end-of-turn token) is not learnt"
        by_reason = [*self.left_out.items(), (cut, self.cut)]
        named = [(f"{self.split}: {len(rows)} {reason}", self._named(rows)) for reason, rows in by_reason if rows]
        return [*self.notes, *(f"{line} ({places})" for line, places in named)]

    def add(self, other: Encoding) -> None:
        """Add the counts and indices of the next part of the split."""
        for reason, indices in other.left_out.items():
            self.left_out[reason] += indices
        self.cut += other.cut
        self.raw += other.raw
        self.windowed += other.windowed
        self.unpaired += other.unpaired
        for where, indices in other.control_tokens.items():
            self.control_tokens[where] += indices

    def check(self, examples: int, rules: Rules) -> None:
        """Raise UserError if no example of the split is left or, under `--truncation error`, if one is too long."""
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
    """Return the ids that end an answer: the tokenizer's eos, and the eos ids in the model's generation settings."""
    return {tokenizer.eos_token_id, *named_ends(generation_config)} - {None}


def named_ends(generation_config: Any) -> set[int]:
    """Return the eos ids in a model's generation settings; none without such settings."""
    named = getattr(generation_config, "eos_token_id", None)
    return {*(named if isinstance(named, list) else [named])} - {None}
