"""What an audit reports: its findings, the figures of splits and steps, and examples as the model reads them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from accel_sft.chat.encoded import Encoded
from accel_sft.data.step_plan import StepPlan
from accel_sft.data.token_store import StoredEncoding
from accel_sft.io.text import printable
from accel_sft.tools.check.findings import GRADES, DataFinding
from accel_sft.tools.check.tokens import supervised_positions

_BINS = 10
"""Maximum number of bars in a histogram of lengths."""
_BEGINNING, _BEFORE_ANSWER, _OF_ANSWER = 60, 120, 400
"""Tokens shown of a long example: at its beginning, before each answer, and from the start of each answer."""
_CONTEXT = 4
"""Number of preceding tokens that a token is decoded with: some tokenizers drop the space before the first word."""


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of auditing a task's data for a model.

    Attributes:
        findings: the gravest first.
        steps: the figures of the training steps; None if the training split cannot be used.
        notes: lines on how the data was read, such as what the chat template did.
    """

    task: str
    model: str
    findings: list[DataFinding]
    splits: list[SplitFigures]
    steps: StepFigures | None
    notes: list[str]
    examples: list[Shown]

    def count(self, grade: str) -> int:
        return sum(finding.grade == grade for finding in self.findings)

    def failed(self, strict: bool) -> bool:
        """Whether there are errors or, with `strict`, warnings."""
        return bool(self.count("error") or (strict and self.count("warning")))

    @property
    def verdict(self) -> str:
        """How many errors, warnings and notes there are, in words."""
        if not self.findings:
            return "nothing was found that needs fixing"
        counts = [(grade, self.count(grade)) for grade in GRADES]
        return ", ".join(f"{count} {grade}{'s' * (count != 1)}" for grade, count in counts if count)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "task": self.task,
            "model": self.model,
            **{f"{grade}s": self.count(grade) for grade in GRADES},
            "findings": [finding.as_dict() for finding in self.findings],
            "splits": [dataclasses.asdict(split) for split in self.splits],
            "steps": self.steps and dataclasses.asdict(self.steps),
            "notes": self.notes,
            "examples": [
                {**dataclasses.asdict(shown), "pieces": [piece._asdict() for piece in shown.pieces]}
                for shown in self.examples
            ],
        }


@dataclasses.dataclass(frozen=True)
class Bin:
    """A bar of the histogram: how many rows have `least` to `most` tokens."""

    least: int
    most: int
    rows: int


@dataclasses.dataclass(frozen=True)
class SplitFigures:
    """The figures of one split. Lengths are in tokens and count only the examples that are used."""

    split: str
    rows: int
    used: int
    left_out: int
    cut: int
    distinct_prompts: int = 0
    distinct_rows: int = 0
    other_right_answers: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    lengths: dict[str, int] = dataclasses.field(default_factory=dict)
    longest_answer: int = 0
    histogram: list[Bin] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """How many steps and tokens training with these settings takes; `step_tokens` are those of an average step."""

    steps: int
    epochs: float
    global_batch_size: int
    tokens_per_epoch: int
    supervised_tokens_per_epoch: int
    step_tokens: float
    step_supervised_tokens: float


def split_figures(encoding: StoredEncoding | None, split: str, rows: int, repeats: dict[str, Any]) -> SplitFigures:
    """The figures of a split.

    Args:
        encoding: None if nothing could be tokenized.
        rows: number of rows in the split, the unreadable ones included.
        repeats: the counts that `repeats.within` returns; {} if nothing could be read.
    """
    if encoding is None:
        return SplitFigures(split, rows, used=0, left_out=rows, cut=0, **repeats)
    lengths, supervised = encoding.kept.lengths, encoding.kept.supervised
    quantiles = {"shortest": 0, "median": 0.5, "95 %": 0.95, "99 %": 0.99, "longest": 1}
    return SplitFigures(
        split,
        rows,
        used=encoding.kept.examples,
        left_out=rows - encoding.kept.examples,
        cut=len(encoding.cut),
        **repeats,
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised_tokens=int(supervised.sum(dtype=np.int64)),
        lengths={name: int(np.quantile(lengths, share, method="higher")) for name, share in quantiles.items()},
        longest_answer=int(encoding.kept.answers.max()),
        histogram=_histogram(lengths),
    )


def _histogram(lengths: np.ndarray) -> list[Bin]:
    """Return at most `_BINS` bars of equal width: a bar for each length if that is not too many."""
    least, most = int(lengths.min()), int(lengths.max())
    width = max(-(-(most - least + 1) // _BINS), 1)
    counts = np.bincount((lengths - least) // width, minlength=1)
    return [
        Bin(least + number * width, min(least + (number + 1) * width - 1, most), int(count))
        for number, count in enumerate(counts)
    ]


def step_figures(plan: StepPlan) -> StepFigures:
    """The size of the plan's steps. Rows of a source count by its share."""
    total = plan.total_steps
    rows = total * plan.global_batch_size if plan.stream_length is None else plan.stream_length
    tokens, supervised = plan.mean(plan.lengths), plan.mean(plan.supervised)  # of a row
    return StepFigures(
        total,
        plan.epoch(total),
        plan.global_batch_size,
        round(plan.epoch_rows * tokens),
        round(plan.epoch_rows * supervised),
        rows / total * tokens,
        rows / total * supervised,
    )


class Piece(NamedTuple):
    """Tokens that together decode to whole characters; with `gap`, tokens that are not shown: `text` says how many."""

    text: str
    supervised: bool
    special: bool = False
    ids: tuple[int, ...] = ()
    gap: bool = False

    @property
    def visible(self) -> str:
        """The text, with line breaks and control characters made visible."""
        return f" … {self.text} … " if self.gap else printable(self.text).replace("\n", "⏎\n")


@dataclasses.dataclass(frozen=True)
class Shown:
    """An example to be printed: `where` it comes from, its pieces, and how many of its tokens are supervised."""

    split: str
    index: int
    where: str
    tokens: int
    supervised: int
    pieces: list[Piece]


def pieces_of(tokenizer: Any, example: Encoded, pad_token_id: int) -> list[Piece]:
    """Return the example's tokens as text. The collator decides which of them are supervised."""
    (positions,) = supervised_positions([example], pad_token_id)
    learnt, ids = set(positions), example.input_ids
    special = set(tokenizer.all_special_ids)
    special |= {at for at, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    pieces: list[Piece] = []
    at = 0
    for span in _spans(sorted(learnt), len(ids)):
        if span.start > at:
            pieces.append(Piece(f"{span.start - at:,} tokens", span.start - 1 in learnt, gap=True))
        pieces += _decoded(tokenizer, ids, span, learnt, special)
        at = span.stop
    return pieces


def _spans(learnt: Sequence[int], length: int) -> list[range]:
    """Return the positions that are shown: the example's first tokens, and for each span of supervised tokens some
    tokens before it, its first ones and its last two; without such a span, the example's last tokens."""
    shown = np.zeros(length, dtype=bool)
    shown[:_BEGINNING] = True
    for answer in _runs(np.asarray(learnt, dtype=np.int64)):
        shown[max(answer.start - _BEFORE_ANSWER, 0) : min(answer.start + _OF_ANSWER, answer.stop)] = True
        shown[max(answer.stop - 2, 0) : answer.stop] = True
    if not learnt:
        shown[-_BEFORE_ANSWER:] = True
    return _runs(np.flatnonzero(shown))


def _runs(positions: np.ndarray) -> list[range]:
    """Return sorted positions as ranges of those that follow each other."""
    parts = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return [range(int(part[0]), int(part[-1]) + 1) for part in parts if len(part)]


def _decoded(tokenizer: Any, ids: Sequence[int], span: range, learnt: set[int], special: set[int]) -> Iterator[Piece]:
    begin = span.start
    for at in span:
        alone = ids[at] in special
        last = at + 1 == span.stop or (at + 1 in learnt) != (at in learnt) or ids[at + 1] in special
        text = _text(tokenizer, ids, begin, at + 1)
        if alone or last or not text.endswith("\ufffd"):  # U+FFFD is a part of a character, which the next continues
            yield Piece(text, at in learnt, alone, tuple(ids[begin : at + 1]))
            begin = at + 1


def _text(tokenizer: Any, ids: Sequence[int], begin: int, end: int) -> str:
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    context = list(ids[max(begin - _CONTEXT, 0) : begin])
    before, text = (tokenizer.decode(part, **options) for part in (context, context + list(ids[begin:end])))
    if not text.startswith(before):
        return tokenizer.decode(list(ids[begin:end]), **options)
    return text[len(before) :]
