"""`Batching` groups a step's examples into forwards and divides them among the ranks, by layouts.

A layout orders rows, counts what they cost and makes their tensors (order of tokens, attention mask). To add one, put
an instance, of a new class if need be, into `LAYOUTS`.

`shared` and `packed` put the rows of a forward into one sequence. Rows in lexicographic order form a tree: what a row
has in common with the one before it is there already, and only the rest is appended. Each token sees its own path
through the tree and nothing else, at the position it has in its own row. So every row's loss and gradient are what they
are alone:

    system prompt, "Split "  -+- "1234="  -+- "12 + 1222"        16 tokens for what would be 30:
                              |            +- "34 + 1200"        a question asked twice and an instruction
                              +- "57="     -+- "50 + 7"          asked three times are computed once

`packed` is the same without anything in common; `padded` is for models whose attention takes no such mask.
"""

import abc
import bisect
import dataclasses
import fnmatch
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
from accel_sft.batching.loss import HEADS
from accel_sft.chat.encoded import Encoded
from accel_sft.io.text import common_length
from accel_sft.models.architecture import arguments, cache_argument, limited_layers, takes_sdpa, without_adapter
from accel_sft.models.prefix_attention import installed

FILLED = 2
"""Limit of padding in row-by-row attention: rows padded to the longest may have this many times a forward's tokens."""


class Layout(abc.ABC):
    """How the rows of one forward are laid out. The base class puts rows in one sequence, without common tokens.

    Attributes:
        name: a value of `--batching`. Rows of `shared` share tokens, and with them dropout masks.
        attention: how attention separates the rows, as a batching's record names it.
        implementation: pattern for the names of transformers' attentions that can separate rows in this way.
        one_sequence: whether all rows stand in one sequence, where they must not see each other.
        behind_cache: whether rows go on from the cache of their prefix.
        cpu_tokens: sizes of a forward, in tokens, to choose from on a CPU, where nothing is tried.
    """

    attention: str
    implementation: str
    one_sequence = True
    behind_cache = False
    cpu_tokens: tuple[int, ...] = (256, 512, 1024)

    def __init__(self, name: str) -> None:
        self.name = name
        self.shares = name == "shared"

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        """Why the model, as it is configured, cannot take rows like these in this layout; None if it may."""
        implementation = str(getattr(model.config, "_attn_implementation", None))
        if not fnmatch.fnmatchcase(implementation, self.implementation):
            other = "sdpa can" if takes_sdpa(model) else "the model has no other"
            return f"attention {implementation} cannot take a mask of rows; {other}"
        if "position_ids" not in arguments(model):
            return "the model takes no positions"
        limited = limited_layers(model, max(map(_longest, row_sets)))
        return f"the model has layers of another kind ({limited})" if limited else None

    def is_needless(self, exact: Sequence["Layout"], *, pictured: bool) -> bool:
        """Whether trying this layout is pointless beside those of its name that are exact, or for rows with images."""
        return False

    def order(self, example: Encoded) -> tuple[Any, int]:
        """Sort key of a step's rows, before they are divided among forwards."""
        return -len(example.input_ids), example.index

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        """Number of leading tokens of each row that already stand in the forward when the row is appended."""
        return [0] * min(len(examples), 1) + [self.prefix(examples)] * (len(examples) - 1)

    def prefix(self, examples: Sequence[Encoded]) -> int:
        """Number of leading tokens that stand in the forward once, before each row's own tokens."""
        return 0

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Whether the forward's memory stays near that of `tokens` tokens."""
        return True

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        """Number of tokens that a forward of these examples, in this order, computes."""
        return sum(len(example.input_ids) for example in examples) - sum(self.common(examples))

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        """Number of query-key pairs that attention computes in a forward of these examples, in this order. A row's own
        tokens attend to the prefix and to the row, padded to the longest."""
        longest, prefix = _longest(examples), self.prefix(examples)
        return prefix**2 + len(examples) * (longest - prefix) * longest

    def copied_keys(self, examples: Sequence[Encoded]) -> int:
        """Number of keys that attention copies in each layer where it has no kernels for rows of different lengths
        behind one prefix (models/cascade.py)."""
        return 0

    @abc.abstractmethod
    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        """The tensors of one forward of at least one example, on the current device."""


class Tree(Layout):
    """Rows in lexicographic order behind the prefixes they share, with a dense mask of who sees whom."""

    attention, implementation = "mask", "sdpa"

    def order(self, example: Encoded) -> tuple[Any, int]:
        return (example.input_ids, example.index) if self.shares else super().order(example)

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        if not self.shares:
            return super().common(examples)
        pairs = itertools.pairwise(example.input_ids for example in examples)
        return [0] * min(len(examples), 1) + [*map(common_length, pairs)]

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        return self.tokens_in(examples) ** 2

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.tree(examples, self.common(examples))


class RowByRow(Layout):
    """Attention runs row by row behind the one prefix that all rows of the forward share, in any order."""

    attention, implementation = "rows", "sdpa"
    cpu_tokens = (1024, 2048, 4096)

    def prefix(self, examples: Sequence[Encoded]) -> int:
        if not self.shares or len(examples) < 2:
            return 0
        rows = [example.input_ids for example in examples]
        return min(common_length(rows), *(len(row) - 1 for row in rows))  # each keeps a token of its own

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Whether the rows, which attention pads to the longest, stay within FILLED times `tokens`."""
        own = _longest(examples) - self.prefix(examples)
        return len(examples) * own <= max(FILLED * tokens, own)

    def copied_keys(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * _longest(examples) if len(examples) > 1 else 0

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        if len(examples) == 1:
            return collate.tree(examples, [0])
        if not installed():
            raise RuntimeError("attention by rows: call prefix_attention.install() before the model's forwards")
        return collate.behind_prefix(examples, self.prefix(examples))


class Varlen(Layout):
    """Rows one after another, with their bounds for FlashAttention."""

    # transformers names kernels of the hub by their repository: kernels-community/flash-attn2
    attention, implementation = "varlen", "*flash*"

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.varlen(examples)


class Padded(Layout):
    """Rows one below the other, padded at the right, as every model can take them."""

    attention, implementation = "mask", "*"
    one_sequence = False
    cpu_tokens: tuple[int, ...] = (1024, 4096)

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        return None

    def is_needless(self, exact: Sequence[Layout], *, pictured: bool) -> bool:
        return bool(exact)  # `Causal` is less work

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * _longest(examples)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.padded(examples, pad_token_id)


class Causal(Padded):
    """Padded rows without a mask: padding comes after all of a row's tokens, where causal attention hides it. Fused
    attention is then told that it is causal, and reads no mask of every token and every other."""

    attention = "causal"

    def is_needless(self, exact: Sequence[Layout], *, pictured: bool) -> bool:
        return pictured  # a mask may distinguish an image's tokens from a text's

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        batch = super().collate(examples, pad_token_id)
        batch.inputs["attention_mask"] = None
        return batch


class Cached(Causal):
    """Rows padded at the right, each behind the one prefix of the forward, which the model has read into a cache: for
    layers of any kind that can go on from it. Causality hides the padding."""

    attention, behind_cache = "cache", True
    cpu_tokens = (512, *RowByRow.cpu_tokens)

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        if not cache_argument(without_adapter(model).forward):
            return "the model takes none"
        common = any(map(self.prefix, row_sets))
        return None if common else "rows have nothing in common before what they learn"

    def is_needless(self, exact: Sequence[Layout], *, pictured: bool) -> bool:
        return bool(exact)  # it takes a sequence's place where there is none

    def prefix(self, examples: Sequence[Encoded]) -> int:
        """The common tokens before the one that predicts the first target: the prefix predicts none."""
        if len(examples) < 2:
            return 0
        first = min(span.start for example in examples for span in example.learnt)
        return min(common_length([example.input_ids for example in examples]), first - 1)

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        prefix = self.prefix(examples)
        return prefix + len(examples) * (_longest(examples) - prefix)

    def copied_keys(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * _longest(examples) if self.prefix(examples) else 0

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        if not (prefix := self.prefix(examples)):
            return super().collate(examples, pad_token_id)
        return collate.behind_cache(examples, prefix, pad_token_id)


LAYOUTS: tuple[Layout, ...] = (
    RowByRow("shared"),
    Tree("shared"),
    Cached("shared"),
    RowByRow("packed"),
    Tree("packed"),
    Varlen("packed"),
    Causal("padded"),
    Padded("padded"),
)
"""All layouts, in the order in which they are tried on a model."""
WHAT = {"shared": "one copy of what rows share", "packed": "rows in one sequence", "padded": "each row by itself"}
"""The layouts in words, for messages."""


def _longest(examples: Sequence[Encoded]) -> int:
    return max((len(example.input_ids) for example in examples), default=0)


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
