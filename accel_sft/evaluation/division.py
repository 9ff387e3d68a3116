"""Which rows a rank answers, and which of them together: from their lengths alone, the same on every rank."""

import heapq
import math
from collections.abc import Sequence

import numpy as np

from accel_sft.chat.encoded import Encoded
from accel_sft.io.text import common_length

SHORTEST_PREFIX = 8
"""Number of common tokens below which sharing them saves nothing."""


def common_prefix(examples: Sequence[Encoded]) -> int:
    """Return the length of the prompts' common prefix, shorter than every prompt; 0 if below SHORTEST_PREFIX."""
    prompts = [example.input_ids[: example.prompt_length] for example in examples]
    length = min(common_length(prompts), min(map(len, prompts)) - 1)
    return length if length >= SHORTEST_PREFIX else 0


def shares(examples: Sequence[Encoded], ranks: int) -> list[list[Encoded]]:
    """Divide examples among ranks, so that each has about as many tokens to compute; every rank gets the same result.

    The expected answers stand for those to come. A rank's longest examples come first, so that no long one is left
    alone at the end.
    """
    found: list[list[Encoded]] = [[] for _ in range(ranks)]
    tokens = [(0, rank) for rank in range(ranks)]  # a heap
    for example in sorted(examples, key=lambda example: (-len(example.input_ids), example.index)):
        least, rank = tokens[0]
        found[rank].append(example)
        heapq.heapreplace(tokens, (least + len(example.input_ids), rank))
    return found


def divide(
    examples: Sequence[Encoded], ranks: int, batch_size: int, *, equal_lengths: bool = False
) -> list[list[list[Encoded]]]:
    """Divide examples into batches of similar length, longest first, each a list of rows for each rank.

    A row's length includes the expected answer. Every rank gets the same result. Within a batch the ranks' numbers of
    rows differ by one at most, and the longest prompt goes to another rank than in the batch before.

    Args:
        equal_lengths: whether all prompts of a batch must have the same number of tokens.
    """
    ordered = sorted(examples, key=lambda example: (-len(example.input_ids), example.index))
    groups: dict[int, list[Encoded]] = {}
    for example in ordered:
        groups.setdefault(example.prompt_length if equal_lengths else 0, []).append(example)
    batches: list[list[list[Encoded]]] = []
    for group in groups.values():
        count = math.ceil(len(group) / (ranks * batch_size))
        for places in np.array_split(np.arange(len(group)), count):
            rows = sorted((group[at] for at in places), key=lambda example: (-example.prompt_length, example.index))
            batches.append([rows[(rank + len(batches)) % ranks :: ranks] for rank in range(ranks)])
    return batches
