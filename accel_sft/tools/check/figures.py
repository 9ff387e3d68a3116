"""Counts a task's data: rows, tokens, lengths, steps, and how many tokens each batching layout would compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_sft.batching.layouts import Batching
from accel_sft.data.step_plan import StepPlan
from accel_sft.data.token_store import StoredEncoding

FORWARD_TOKENS = 4096
"""Tokens of one forward in the comparison of layouts, if --micro-batch-size is auto."""
_STEPS = 8
"""Maximum number of steps, evenly spread over the run, whose computed tokens are counted."""
_BINS = 10
"""Maximum number of bars in a histogram of lengths."""
_NAMES = {
    ("padded", "mask"): "padded rows",
    ("packed", "rows"): "packed",
    ("shared", "rows"): "shared, one prefix",
    ("shared", "mask"): "shared, tree of prefixes",
}
"""Names in docs/batching.md by (layout, attention), of those that differ in how many tokens they compute."""


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
class LayoutFigures:
    """How many tokens a layout computes for some steps, padding included, and the ratio to what padded rows compute."""

    name: str
    computed_tokens: int
    of_padded: float


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """How many steps and tokens training with these settings takes.

    Attributes:
        step_tokens, step_supervised_tokens: tokens of an average step.
        forward: the size of one forward in words, such as "4,096 tokens".
        layouts: what each layout computes for `counted_steps` steps on one rank, in forwards of the size `forward`.
    """

    steps: int
    epochs: float
    global_batch_size: int
    tokens_per_epoch: int
    supervised_tokens_per_epoch: int
    step_tokens: float
    step_supervised_tokens: float
    counted_steps: int
    forward: str
    layouts: list[LayoutFigures]


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
    at = {name: int(np.quantile(lengths, share, method="higher")) for name, share in quantiles.items()}
    return SplitFigures(
        split,
        rows,
        used=encoding.kept.examples,
        left_out=rows - encoding.kept.examples,
        cut=len(encoding.cut),
        **repeats,
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised_tokens=int(supervised.sum(dtype=np.int64)),
        lengths=at,
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


def step_figures(train: StoredEncoding, plan: StepPlan, micro_batch_size: str) -> StepFigures:
    """The size of the plan's steps, and how many tokens each layout computes for some of them."""
    store, total = train.kept, plan.total_steps
    steps = sorted({round(at * (total - 1) / max(_STEPS - 1, 1)) for at in range(_STEPS)})
    batches = [store.take(sorted(plan.examples(step).tolist())) for step in steps]
    rows = None if micro_batch_size == "auto" else int(micro_batch_size)
    tokens, supervised = plan.mean(plan.lengths), plan.mean(plan.supervised)  # of a row
    count = sum(len(batch) for batch in batches) / len(batches)
    # data that has images is always padded, its rows without images too
    names = {key: name for key, name in _NAMES.items() if key[0] == "padded" or not len(store.pictured)}
    computed = {name: _computed(key, rows, batches) for key, name in names.items()}
    padded = computed[_NAMES["padded", "mask"]]
    return StepFigures(
        total,
        plan.epoch(total),
        plan.global_batch_size,
        round(plan.epoch_rows * tokens),
        round(plan.epoch_rows * supervised),
        count * tokens,
        count * supervised,
        len(steps),
        f"{rows} examples" if rows else f"{FORWARD_TOKENS:,} tokens",
        [LayoutFigures(name, tokens, tokens / padded) for name, tokens in computed.items()],
    )


def _computed(key: tuple[str, str], rows: int | None, batches: Sequence[Sequence]) -> int:
    layout, attention = key
    batching = Batching(layout, tokens=FORWARD_TOKENS, rows=rows, attention=attention)
    return sum(batching.computed_tokens(batch, 1) for batch in batches)
