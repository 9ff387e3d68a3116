"""`Batching` groups a step's examples into forwards and divides them among the ranks; forward_layouts.py has the
layouts.

`shared` and `packed` put the rows of a forward into one sequence. Rows in lexicographic order form a tree: what a row
has in common with the one before it is there already, and only the rest is appended. Each token sees its own path
through the tree and nothing else, at the position it has in its own row. So every row's loss and gradient are what they
are alone:

    system prompt, "Split "  -+- "1234="  -+- "12 + 1222"        16 tokens for what would be 30:
                              |            +- "34 + 1200"        a question asked twice and an instruction
                              +- "57="     -+- "50 + 7"          asked three times are computed once

`packed` is the same without anything in common; `padded` is for models whose attention takes no such mask.
"""

import bisect
import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
from accel_sft.batching.forward_layouts import LAYOUTS, Layout
from accel_sft.batching.loss import HEADS
from accel_sft.chat.encoded import Encoded

_BY_NAMES = {(layout.name, layout.attention): layout for layout in LAYOUTS}

PAIRS = 6
"""Query-key pairs per hidden dimension whose attention costs as much as one token's linear layers: in a layer a token
is multiplied by about 12 width^2 weights, and a pair takes 2 width products."""


@dataclasses.dataclass(frozen=True)
class Batching:
    """How rows become forwards, as runs and checkpoints record it (`dataclasses.asdict`).

    Attributes:
        layout: `shared`, `packed` or `padded`.
        tokens: maximum number of tokens computed in one forward (a longer row has a forward to itself).
        rows: maximum number of examples in one forward; if given, `tokens` does not count.
        attention: how attention separates rows, which chooses among the layouts of one name: `mask`, `causal`,
            `varlen`, `rows` or `cache`.
        head: where and how logits are computed, one of `loss.HEADS`.
        most_logits: maximum number of logits that the head `pieces` holds at once, chosen by a GPU's free memory; None:
            MOST_LOGITS.
    """

    layout: str
    tokens: int
    rows: int | None = None
    attention: str = "mask"
    head: str = "labelled"
    most_logits: int | None = None

    def __post_init__(self) -> None:
        if (self.layout, self.attention) not in _BY_NAMES or self.head not in HEADS:
            raise ValueError(f"no batching {self.layout}, {self.attention}, {self.head}")

    @property
    def way(self) -> Layout:
        """The layout that `layout` and `attention` name."""
        return _BY_NAMES[self.layout, self.attention]

    def divide(self, examples: Sequence[Encoded], world_size: int) -> list[list[list[Encoded]]]:
        """Return each rank's forwards: equally many, with nearly equal tokens; empty ones make up the number.

        The result is the same on every rank. Forwards are ordered by size, so that ranks that wait for each other in
        every forward (ZeRO-3) wait little.
        """
        forwards = self._group(sorted(examples, key=self.way.order), world_size)
        if len(forwards) == world_size == 1:
            return [forwards]
        sized = sorted(((self.way.tokens_in(rows), rows) for rows in forwards), key=lambda pair: -pair[0])
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
        """Return the rows of all ranks' forwards, whose number is a multiple of the ranks if there are enough rows."""
        way = self.way
        if self.rows:
            count = world_size * math.ceil(math.ceil(len(examples) / world_size) / self.rows)
            return [[examples[row] for row in rows] for rows in np.array_split(np.arange(len(examples)), count)]
        if world_size == 1 and way.tokens_in(examples) <= self.tokens and way.is_even(examples, self.tokens):
            return [examples]
        alone = [[example] for example in examples if len(example.input_ids) > self.tokens]
        examples = [example for example in examples if len(example.input_ids) <= self.tokens]
        if not examples:
            return alone
        lengths = [len(example.input_ids) for example in examples]
        own = [length - shared for length, shared in zip(lengths, way.common(examples), strict=True)]
        prefix = way.prefix(examples)
        count = math.ceil(sum(own) / self.tokens)
        count += -(len(alone) + count) % world_size
        while True:
            ends = _least_largest(lengths, own, count, self.tokens, None if way.one_sequence else prefix)
            if ends is not None:
                groups = [examples[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
                if count >= len(examples) or all(way.is_even(rows, self.tokens) for rows in groups):
                    return alone + groups
            count += world_size

    def computed_tokens(self, examples: Sequence[Encoded], world_size: int) -> int:
        """Tokens, padding included, that all ranks together compute for a step of these examples."""
        return sum(self.way.tokens_in(rows) for forwards in self.divide(examples, world_size) for rows in forwards)

    def work(self, examples: Sequence[Encoded], world_size: int, width: int, forward_cost: float) -> float:
        """Return the cost, in tokens, of a step of these examples on the rank with most work. A forward has a fixed
        cost, in tokens; `width` is the model's hidden size."""
        way = self.way
        return max(
            sum(way.tokens_in(rows) + way.attended_pairs(rows) / (PAIRS * width) + forward_cost for rows in forwards)
            for forwards in self.divide(examples, world_size)
        )

    def batch(
        self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device, blank: Encoded | None = None
    ) -> Batch:
        """Return the tensors of one forward; without examples, those of `collate.empty`. With `blank`, an image's row,
        a forward without images calls the layers that read images, too."""
        pictured = any(row.images for row in examples)
        assert self.layout == "padded" or not (pictured or blank), "rows with images are padded"
        with device:
            if blank and not pictured:
                batch = collate.padded(examples or [blank], pad_token_id, blank if examples else None)
            else:
                batch = self.way.collate(examples, pad_token_id) if examples else collate.empty(pad_token_id)
        return dataclasses.replace(batch, head=self.head, most_logits=self.most_logits)


def _least_largest(lengths: list[int], own: list[int], count: int, limit: int, prefix: int | None) -> list[int] | None:
    """Return the ends of at most `count` groups of consecutive rows, the largest group being as small as can be; None
    if it would be above `limit`.

    Bisects over the largest allowed size, and for each size fills the groups greedily.

    Args:
        own: tokens of each row that the row before it does not have.
        prefix: length of the shared prefix of padded rows; None for rows in one sequence.
    """

    def ends_within(allowed: int) -> list[int] | None:
        ends: list[int] = []
        load = rows = longest = 0
        for at, (length, new) in enumerate(zip(lengths, own, strict=True)):
            # rows that are padded come with the longest first
            more = load + new if prefix is None else prefix + (longest - prefix) * (rows + 1)
            if rows and more <= allowed:
                load, rows = more, rows + 1
                continue
            if rows:
                ends.append(at)
                if len(ends) == count:
                    return None
            load, rows, longest = length, 1, length
        return [*ends, len(lengths)]

    if ends_within(limit) is None:
        return None
    sizes = range(max(lengths), limit + 1)
    return ends_within(sizes[bisect.bisect_left(sizes[:-1], True, key=lambda size: ends_within(size) is not None)])
