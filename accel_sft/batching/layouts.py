"""`Batching` groups a step's examples into forwards and divides them among the ranks, by layouts.

A layout counts what rows cost and makes their tensors. To add a layout, put its instance (of a new class,
if needed) into `LAYOUTS`.

`shared` puts the rows of a forward after one copy of their common prefix. Each row sees the prefix and itself, at the
same positions as if it were alone, so loss and gradient are also the same. Three rows, for example:

    system prompt, "Split "  -+- "1234=", "12 + 1222"        16 tokens instead of 30
                              +- "1234=", "34 + 1200"
                              +- "57=", "50 + 7"

The prefix ends before the token that predicts the first target, so that each target is predicted once for each row.
The two answers of a pair stand behind one copy of their prompt in the same way; other layouts read a pair as two rows.
`packed` is the same without a prefix; `padded` is for models whose attention cannot keep rows apart.
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
from accel_sft.chat.encoded import Encoded, Pair, sequences
from accel_sft.io.text import common_length
from accel_sft.models.architecture import arguments, cache_argument, limited_layers, without_adapter
from accel_sft.models.prefix_attention import installed

FILLED = 2
"""In one-sequence layouts, only attention pads rows to the longest row. With this padding, a forward may have up to
FILLED times as many tokens as its limit."""


class Layout(abc.ABC):
    """How the rows of one forward are laid out.

    Attributes:
        name: a value of `--batching`. Rows of `shared` share tokens, and so the dropout masks of these tokens.
        attention: name of how attention separates the rows, for the record of a batching.
        implementation: pattern for the names of transformers' attention functions that can separate rows in this way.
        one_sequence: whether all rows are in one sequence, in which they must not see each other.
        cpu_tokens: sizes of a forward, in tokens, to choose from on a CPU.
    """

    attention: str
    implementation: str
    one_sequence = True
    behind_cache = False
    cpu_tokens: tuple[int, ...] = (1024, 2048, 4096)

    def __init__(self, name: str) -> None:
        self.name = name

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        """Why the model, as configured, cannot compute these rows in this layout; None if nothing rules it out."""
        implementation = str(getattr(model.config, "_attn_implementation", None))
        if not fnmatch.fnmatchcase(implementation, self.implementation):
            return f"attention {implementation} cannot keep rows apart"
        if "position_ids" not in arguments(model):
            return "the model does not accept position_ids"
        limited = limited_layers(model, max(map(_longest, row_sets)))
        return f"the model has layers without full attention ({limited})" if limited else None

    def rows(self, examples: Sequence[Encoded]) -> Sequence[Encoded]:
        """The rows that the layout makes of these examples: two of a pair, unless its one sequence forks."""
        return sequences(examples)

    def prefix(self, examples: Sequence[Encoded]) -> int:
        """Number of tokens that all rows begin with and that predict no target; the forward has only one copy of these
        tokens."""
        if self.name != "shared" or len(examples) < 2:
            return 0
        first_target = max(min(example.spans[0][0] for example in examples), 1)
        return min(common_length([example.input_ids for example in examples]), first_target - 1)

    def added(self, example: Encoded, prefix: int = 0) -> int:
        """Number of tokens that an example adds to a forward after its prefix."""
        return sum(len(row.input_ids) - prefix for row in self.rows([example]))

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        """Number of tokens that a forward of these examples computes."""
        prefix = self.prefix(examples)
        return prefix * bool(examples) + sum(self.added(example, prefix) for example in examples)

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        """Number of query-key pairs that attention computes in a forward, with rows padded to the longest row."""
        rows, prefix = sequences(examples), self.prefix(examples)
        longest = _longest(rows)
        return prefix**2 + len(rows) * (longest - prefix) * longest

    def copied_keys(self, examples: Sequence[Encoded]) -> int:
        """Number of keys that a layer's attention copies if the kernels of models/cascade.py cannot be used."""
        rows = sequences(examples)
        return len(rows) * _longest(rows) if self.prefix(examples) else 0

    def computed(self, examples: Sequence[Encoded]) -> tuple[int, float]:
        """Numbers of tokens and of query-key pairs in a forward: shared tokens count once, padding never."""
        tokens, pairs, prefix = 0, 0.0, self.prefix(examples)
        for number, row in enumerate(self.rows(examples)):
            shared = prefix if number else 0
            for branch, of_row in enumerate(row.sequences):
                shared = row.forks_at if branch and isinstance(row, Pair) else shared
                tokens += len(of_row.input_ids) - shared
                pairs += (len(of_row.input_ids) ** 2 - shared**2) / 2
        return tokens, pairs

    @abc.abstractmethod
    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        """The tensors of one forward of at least one example, on the current device."""


class RowByRow(Layout):
    """Rows stand one after another, after their prefix; attention runs row by row."""

    attention, implementation = "rows", "sdpa"

    def rows(self, examples: Sequence[Encoded]) -> Sequence[Encoded]:
        return examples

    def added(self, example: Encoded, prefix: int = 0) -> int:
        return len(example.input_ids) - prefix

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        if not installed():
            raise RuntimeError("attention by rows: call prefix_attention.install() before the model's forwards")
        return collate.row_by_row(examples, self.prefix(examples))


class Varlen(Layout):
    """Rows stand one after another; FlashAttention gets the bounds of each."""

    # transformers names the hub's kernels by their repository, such as kernels-community/flash-attn2
    attention, implementation = "varlen", "*flash*"

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.varlen(self.rows(examples))


class Padded(Layout):
    """A batch of rows, padded at the right, which every model can take."""

    attention, implementation = "mask", "*"
    one_sequence = False
    cpu_tokens: tuple[int, ...] = (1024, 4096)

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        return None

    def added(self, example: Encoded, prefix: int = 0) -> int:
        rows = self.rows([example])
        return len(rows) * (_longest(rows) - prefix)

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        rows, prefix = self.rows(examples), self.prefix(examples)
        return prefix + len(rows) * (_longest(rows) - prefix)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.padded(self.rows(examples), pad_token_id)


class Causal(Padded):
    """Padded rows without a mask: padding follows a row's tokens, so causal attention hides it."""

    attention = "causal"

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        pictured = any(row.images for rows in row_sets for row in rows)
        return "rows have images, for which the model may need a mask" if pictured else None

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        batch = super().collate(examples, pad_token_id)
        batch.inputs["attention_mask"] = None
        return batch


class Cached(Causal):
    """Padded rows that continue from a cache of the forward's prefix; the cache covers stateful layers too."""

    attention, behind_cache = "cache", True
    cpu_tokens = (512, *Layout.cpu_tokens)

    def refusal(self, model: Any, row_sets: Sequence[Sequence[Encoded]]) -> str | None:
        return None if cache_argument(without_adapter(model).forward) else "the model does not accept a cache"

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        if not (prefix := self.prefix(examples)):
            return super().collate(examples, pad_token_id)
        return collate.behind_cache(self.rows(examples), prefix, pad_token_id)


LAYOUTS: tuple[Layout, ...] = (
    RowByRow("shared"),
    Cached("shared"),
    RowByRow("packed"),
    Varlen("packed"),
    Causal("padded"),
    Padded("padded"),
)
"""All layouts. If several have the same name, a model gets the first of them that it computes exactly."""
WHAT = {"shared": "one copy of what rows share", "packed": "rows in one sequence", "padded": "each row by itself"}
"""The layouts in words, for messages."""


def _longest(examples: Sequence[Encoded]) -> int:
    return max((len(example.input_ids) for example in examples), default=0)


_BY_NAMES = {(layout.name, layout.attention): layout for layout in LAYOUTS}

PAIRS = 6
"""Attention to PAIRS * width query-key pairs (width: the hidden size) costs as much as the linear layers for one token:
in each layer, a token takes about 12 width^2 multiplications, and a pair takes 2 width."""


@dataclasses.dataclass(frozen=True)
class Batching:
    """How rows become forwards, as runs and checkpoints record it: `layout` and `attention` name the layout, and `head`
    is in `loss.HEADS`. A forward has at most `rows` rows if `rows` is given, else at most `tokens` computed tokens (a
    longer row gets a forward of its own)."""

    layout: str
    tokens: int
    rows: int | None = None
    attention: str = "mask"
    head: str = "labelled"

    def __post_init__(self) -> None:
        if (self.layout, self.attention) not in _BY_NAMES or self.head not in HEADS:
            raise ValueError(f"no batching {self.layout}, {self.attention}, {self.head}")

    @property
    def way(self) -> Layout:
        """The layout that `layout` and `attention` name."""
        return _BY_NAMES[self.layout, self.attention]

    def divide(self, examples: Sequence[Encoded], world_size: int) -> list[list[list[Encoded]]]:
        """Return each rank's forwards: the same number for every rank (some may be empty), with nearly the same number
        of tokens. Forwards are ordered by size, because under ZeRO-3 ranks wait for each other in every forward."""
        longest_first = sorted(examples, key=lambda example: (-self.way.added(example), example.index))
        forwards = self._group(longest_first, world_size)
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
        """The rows of each forward, longest first. With enough rows, the number of forwards is a multiple of
        `world_size`."""
        if self.rows:
            count = world_size * math.ceil(math.ceil(len(examples) / world_size) / self.rows)
            return [[examples[row] for row in rows] for rows in np.array_split(np.arange(len(examples)), count)]
        alone = [[example] for example in examples if self.way.added(example) > self.tokens]
        examples = examples[len(alone) :]
        if not examples:
            return alone
        prefix = self.way.prefix(examples)
        lengths = [prefix + self.way.added(example, prefix) for example in examples]
        count = math.ceil((sum(lengths) - prefix * (len(lengths) - 1)) / self.tokens)
        count += -(len(alone) + count) % world_size
        while (ends := self._least_largest(lengths, prefix, count)) is None:
            count += world_size
        return alone + [examples[begin:end] for begin, end in itertools.pairwise([0, *ends])]

    def _least_largest(self, lengths: list[int], prefix: int, count: int) -> list[int] | None:
        """Divide consecutive rows into at most `count` groups, the largest as small as possible. Return their ends, or
        None if the rows do not fit."""

        def ends_within(allowed: int) -> list[int] | None:
            ends: list[int] = []
            load = rows = longest = 0
            for at, length in enumerate(lengths):
                load += length - prefix
                size = prefix + (longest - prefix) * (rows + 1)
                if self.way.one_sequence:
                    size = max(load, size // FILLED)
                if rows and size <= allowed:
                    rows += 1
                    continue
                if rows:
                    ends.append(at)
                    if len(ends) == count:
                        return None
                load, rows, longest = length, 1, length
            return [*ends, len(lengths)]

        within = ends_within(self.tokens)
        if within is None or count == 1:
            return within
        sizes = range(lengths[0], self.tokens + 1)
        return ends_within(sizes[bisect.bisect_left(sizes[:-1], True, key=lambda size: ends_within(size) is not None)])

    def work(self, examples: Sequence[Encoded], world_size: int, width: int, forward_cost: float) -> float:
        """The cost of a step of these examples, in tokens, on the rank with the most work. Each forward adds
        `forward_cost` tokens."""
        way = self.way
        return max(
            sum(way.tokens_in(rows) + way.attended_pairs(rows) / (PAIRS * width) + forward_cost for rows in forwards)
            for forwards in self.divide(examples, world_size)
        )

    def batch(
        self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device, blank: Encoded | None = None
    ) -> Batch:
        """The tensors of one forward, which may have no examples. If `blank` (a row with an image) is given, a forward
        without images also calls the image layers."""
        pictured = any(row.images for row in examples)
        assert self.layout == "padded" or not (pictured or blank), "rows with images are padded"
        with device:
            if blank and not pictured:
                batch = collate.padded(examples or [blank], pad_token_id, blank if examples else None)
            else:
                batch = self.way.collate(examples, pad_token_id) if examples else collate.empty(pad_token_id)
        return dataclasses.replace(batch, head=self.head)
