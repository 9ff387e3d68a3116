"""The data in numbers: rows, tokens, lengths, steps, and what each batching layout would compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoding import Encoding
from accel_sft.data.step_plan import StepPlan

FORWARD_TOKENS = 4096
"""Tokens of one forward in the comparison of layouts, if --micro-batch-size is auto."""
_STEPS = 8
"""Steps whose computed tokens are counted, evenly spread over the run."""
_BINS = 10
"""Most bars of a histogram of lengths."""
_NAMES = {
    ("padded", "mask"): "padded rows",
    ("packed", "rows"): "packed",
    ("shared", "rows"): "shared, one prefix",
    ("shared", "mask"): "shared, tree of prefixes",
}
"""(layout, attention) to its name in docs/batching.md, for the layouts that differ in how many tokens they compute."""


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
    distinct_prompts: int
    distinct_rows: int
    other_right_answers: int
    tokens: int
    supervised_tokens: int
    lengths: dict[str, int]
    longest_answer: int
    histogram: list[Bin]


@dataclasses.dataclass(frozen=True)
class LayoutFigures:
    """The tokens that a layout computes for some steps, padding included, and their ratio to those of padded rows."""

    name: str
    computed_tokens: int
    of_padded: float


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """What training with these settings amounts to.

    Attributes:
        step_tokens, step_supervised_tokens: tokens of an average step.
        forward: the size of one forward in words, such as "4,096 tokens".
        layouts: what each layout computes for `counted_steps` steps on one rank, in forwards of that size.
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


def split_figures(encoding: Encoding | None, split: str, rows: int, repeats: dict[str, int]) -> SplitFigures:
    """The figures of a split.

    Args:
        encoding: None if nothing could be tokenized.
        rows: number of rows in the split, the unreadable ones included.
        repeats: the counts that `repeats.within` returns.
    """
    if encoding is None:
        nothing = {"tokens": 0, "supervised_tokens": 0, "lengths": {}, "longest_answer": 0, "histogram": []}
        return SplitFigures(split, rows, 0, rows, 0, **repeats, **nothing)
    lengths, supervised = encoding.kept.lengths, encoding.kept.supervised
    quantiles = {"shortest": 0, "median": 0.5, "95 %": 0.95, "99 %": 0.99, "longest": 1}
    at = {name: int(np.quantile(lengths, share, method="higher")) for name, share in quantiles.items()}
    return SplitFigures(
        split,
        rows,
        encoding.kept.examples,
        rows - encoding.kept.examples,
        len(encoding.cut),
        **repeats,
        tokens=int(lengths.sum(dtype=np.int64)),
        supervised_tokens=int(supervised.sum(dtype=np.int64)),
        lengths=at,
        longest_answer=int(encoding.kept.answers.max()),
        histogram=_histogram(lengths),
    )


def _histogram(lengths: np.ndarray) -> list[Bin]:
    """At most `_BINS` ranges of equal width; one range for each length if there are few."""
    least, most = int(lengths.min()), int(lengths.max())
    width = max(-(-(most - least + 1) // _BINS), 1)
    counts = np.bincount((lengths - least) // width, minlength=1)
    return [
        Bin(least + number * width, min(least + (number + 1) * width - 1, most), int(count))
        for number, count in enumerate(counts)
    ]


def step_figures(train: Encoding, plan: StepPlan, micro_batch_size: str) -> StepFigures:
    """The size of the plan's steps, and how many tokens each layout computes for some of them."""
    store, total = train.kept, plan.total_steps
    steps = sorted({round(at * (total - 1) / max(_STEPS - 1, 1)) for at in range(_STEPS)})
    batches = [store.take(sorted(plan.examples(step).tolist())) for step in steps]
    rows = None if micro_batch_size == "auto" else int(micro_batch_size)
    epoch_tokens, epoch_supervised = (int(each.sum(dtype=np.int64)) for each in (plan.lengths, plan.supervised))
    count = sum(len(batch) for batch in batches)
    mean = count / len(batches) / len(store)
    # data that has images is always padded, its rows without images too
    names = {key: name for key, name in _NAMES.items() if key[0] == "padded" or not len(store.pictured)}
    computed = {name: _computed(key, rows, batches) for key, name in names.items()}
    padded = computed[_NAMES["padded", "mask"]]
    return StepFigures(
        total,
        plan.epoch(total),
        plan.global_batch_size,
        epoch_tokens,
        epoch_supervised,
        mean * epoch_tokens,
        mean * epoch_supervised,
        len(steps),
        f"{rows} examples" if rows else f"{FORWARD_TOKENS:,} tokens",
        [LayoutFigures(name, tokens, tokens / padded) for name, tokens in computed.items()],
    )


def _computed(key: tuple[str, str], rows: int | None, batches: Sequence[Sequence]) -> int:
    layout, attention = key
    batching = Batching(layout, tokens=FORWARD_TOKENS, rows=rows, attention=attention)
    return sum(batching.computed_tokens(batch, 1) for batch in batches)
