"""How the examples of a step are laid out in forwards: behind the prefixes they share, packed, or padded (law 1).

`shared` and `packed` put the rows of a forward into one sequence. Rows in lexicographic order form a tree: what a row
has in common with the one before it is there already, only the rest is appended. Each token sees its own path through
the tree and nothing else, at the position it has in its own row, so causality makes every row's loss and gradient what
it is alone:

    system prompt, "Split "  -+- "1234="  -+- "12 + 1222"        16 tokens for what would be 30:
                              |            +- "34 + 1200"        a question asked twice and an instruction
                              +- "57="     -+- "50 + 7"          asked three times are computed once

`packed` is the same without anything in common; `padded` is for models whose attention takes no such mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
from accel_sft.data.chat import Encoded
from accel_sft.models.prefix_attention import installed

FILLED = 2
"""Times a forward's tokens that its rows, filled up to the longest of them, may take in attention row by row."""

PAIRS = 6
"""Of a query and a key, for each dimension of the hidden state, that cost as much as a token does elsewhere: it meets
about 12 width^2 weights in a layer, and a pair 2 width numbers."""


@dataclasses.dataclass(frozen=True)
class Batching:
    """How rows become forwards.

    Attributes:
        layout: `shared`, `packed` or `padded`.
        tokens: computed in one forward at most (a row that is longer has one to itself).
        rows: examples in one forward at most; wins over `tokens`.
        attention: what attention is told of rows in one sequence: `mask`, who sees whom; `blocks`, that mask's blocks
            for FlexAttention; `varlen`, rows' bounds for FlashAttention (`packed` alone); `rows`, which runs them row
            by row behind the one prefix that all rows of the forward share, in any order (`attention.Rows`).
        head: where and how logits are computed, one of `collate.HEADS`.
    """

    layout: str
    tokens: int
    rows: int | None = None
    attention: str = "mask"
    head: str = "labelled"

    def divide(self, examples: Sequence[Encoded], world_size: int) -> list[list[list[Encoded]]]:
        """The forwards of each rank: equally many, of near-equal tokens, empty ones to make up the number.

        The same on every rank; in the order of their size, so that ranks that wait for each other in every forward
        (ZeRO-3) wait for little.
        """
        forwards = self._group(list(examples), world_size)
        if len(forwards) == world_size == 1:
            return [forwards]
        sized = sorted(((self.tokens_in(rows), rows) for rows in forwards), key=lambda pair: -pair[0])
        sized += [(0, [])] * (-len(sized) % world_size)
        ranks: list[list[list[Encoded]]] = [[] for _ in range(world_size)]
        loads = [0] * world_size
        for at in range(0, len(sized), world_size):
            least_first = sorted(range(world_size), key=loads.__getitem__)
            for rank, (tokens, rows) in zip(least_first, sized[at : at + world_size], strict=True):
                ranks[rank].append(rows)
                loads[rank] += tokens
        return ranks

    def _group(self, examples: list[Encoded], world_size: int) -> list[list[Encoded]]:
        """The rows of each forward, over all ranks; a multiple of the ranks where there are rows enough."""
        if self.layout == "shared" and self.attention != "rows":
            examples.sort(key=lambda example: (example.input_ids, example.index))
        else:
            examples.sort(key=lambda example: (-len(example.input_ids), example.index))
        if self.rows:
            count = world_size * math.ceil(math.ceil(len(examples) / world_size) / self.rows)
            return [[examples[row] for row in rows] for rows in np.array_split(np.arange(len(examples)), count)]
        if world_size == 1 and self.tokens_in(examples) <= self.tokens and self._even(examples):
            return [examples]
        alone = [[example] for example in examples if len(example.input_ids) > self.tokens]
        examples = [example for example in examples if len(example.input_ids) <= self.tokens]
        if not examples:
            return alone
        lengths, common = [len(example.input_ids) for example in examples], self._common(examples)
        count = math.ceil((sum(lengths) - sum(common)) / self.tokens)
        count += -(len(alone) + count) % world_size
        while True:
            ends = _least_largest(lengths, common, count, self.tokens, padded=self.layout == "padded")
            if ends is not None:
                groups = [examples[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
                if count >= len(examples) or all(map(self._even, groups)):
                    return alone + groups
            count += world_size

    def _even(self, examples: Sequence[Encoded]) -> bool:
        """Whether attention row by row, which fills rows up to the longest, stays near the forward's size."""
        if self.attention != "rows" or not examples:
            return True
        longest = max(len(example.input_ids) for example in examples)
        if len(examples) * longest <= FILLED * self.tokens:
            return True
        own = longest - min(self._common(examples)[1:], default=0)
        return len(examples) * own <= max(FILLED * self.tokens, own)

    def _common(self, examples: Sequence[Encoded]) -> list[int]:
        """Leading tokens of each row that stand there already when it is its turn."""
        if self.layout != "shared" or not examples:
            return [0] * len(examples)
        if self.attention != "rows":
            return common_prefixes(examples)
        common = _common_prefix(examples)
        return [0] + [common] * (len(examples) - 1)

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        """Tokens that a forward of these examples, in this order, computes."""
        if self.layout == "padded":
            return len(examples) * max((len(example.input_ids) for example in examples), default=0)
        return sum(len(example.input_ids) for example in examples) - sum(self._common(examples))

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        """Pairs of a query and a key that attention computes in a forward of these examples, in this order."""
        if not examples:
            return 0
        longest = max(len(example.input_ids) for example in examples)
        if self.layout == "padded":
            return len(examples) * longest**2
        if len(examples) == 1 or self.attention not in ("rows", "varlen"):
            return self.tokens_in(examples) ** 2
        common = self._common(examples)[1]
        return common**2 + len(examples) * (longest - common) * longest

    def computed_tokens(self, examples: Sequence[Encoded], world_size: int) -> int:
        """Tokens, padding included, that all ranks together compute for a step of these examples."""
        return sum(self.tokens_in(rows) for rank in self.divide(examples, world_size) for rows in rank)

    def work(self, examples: Sequence[Encoded], world_size: int, width: int, each_forward: float) -> float:
        """What a step of these examples costs the rank that has most, in tokens.

        Args:
            width: the model's hidden size.
            each_forward: what a forward costs beside its tokens and their attention, in tokens.
        """
        return max(
            sum(self.tokens_in(rows) + self.attended_pairs(rows) / (PAIRS * width) + each_forward for rows in forwards)
            for forwards in self.divide(examples, world_size)
        )

    def batch(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        """The tensors of one forward; no example: a connected forward without a target."""
        if not examples:
            batch = collate.empty(pad_token_id, device)
        elif self.layout == "padded":
            batch = collate.padded(examples, pad_token_id, device)
        elif self.attention == "rows" and len(examples) > 1:
            if not installed():
                raise RuntimeError("attention by rows: call prefix_attention.install() before the model's forwards")
            batch = collate.behind_prefix(examples, self._common(examples)[1], device)
        else:
            batch = collate.tree(examples, self._common(examples), self.attention, device)
        return batch.with_head(self.head)


def _least_largest(lengths: list[int], common: list[int], count: int, limit: int, *, padded: bool) -> list[int] | None:
    """Where to end each of at most `count` runs of consecutive rows so that the largest is least; None above `limit`.

    By bisection over the largest allowed, each tried greedily.
    """

    def ends_within(allowed: int) -> list[int] | None:
        ends: list[int] = []
        load = rows = longest = 0
        for at, (length, shared) in enumerate(zip(lengths, common, strict=True)):
            more = longest * (rows + 1) if padded else load + length - shared
            if rows and more <= allowed:
                load, rows = more, rows + 1
                continue
            if rows:
                ends.append(at)
                if len(ends) == count:
                    return None
            load, rows, longest = length, 1, length
        return [*ends, len(lengths)]

    low, high = max(lengths), limit
    best = ends_within(high)
    while best is not None and low < high:
        middle = (low + high) // 2
        ends = ends_within(middle)
        if ends is None:
            low = middle + 1
        else:
            high, best = middle, ends
    return best


def _common_prefix(examples: Sequence[Encoded]) -> int:
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
