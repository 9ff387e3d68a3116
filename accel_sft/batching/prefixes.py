"""Counts the leading tokens that rows have in common."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from accel_sft.data.chat import Encoded


def common_prefix(examples: Sequence[Encoded]) -> int:
    """How many leading tokens all rows have in common, each keeping one of its own."""
    prefix = examples[0].input_ids
    for row in examples[1:]:
        if row.input_ids[: len(prefix)] != prefix:
            prefix = prefix[: _in_common(prefix, row.input_ids)]
    return min(len(prefix), min(len(row.input_ids) for row in examples) - 1)


def common_prefixes(examples: Sequence[Encoded]) -> list[int]:
    """How many leading tokens each row has in common with the one before it; 0 for the first."""
    pairs = itertools.pairwise(examples)
    return [0] * min(len(examples), 1) + [_in_common(a.input_ids, b.input_ids) for a, b in pairs]


def _in_common(a: list[int], b: list[int]) -> int:
    """How many leading tokens two rows have in common: in halves, for slices of lists compare at once."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
