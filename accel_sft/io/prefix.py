"""The prefix that several texts, or several rows of tokens, have in common."""

from collections.abc import Sequence
from typing import Any


def common_length(sequences: Sequence[Sequence[Any]]) -> int:
    """How many leading characters or tokens all of them have in common.

    The first and the last in alphabetical order differ soonest. They are compared by halves, as Python compares slices
    several times faster than it loops.
    """
    first, last = min(sequences), max(sequences)
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
