"""The prefix that several texts, or several rows of tokens, have in common."""

from collections.abc import Sequence


def common_length(sequences: Sequence[str] | Sequence[list[int]]) -> int:
    """Return how many leading characters or tokens all sequences have in common.

    The first and the last sequence in sorted order have the shortest prefix in common. It is found by bisection: Python
    compares slices several times faster than it loops.
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
