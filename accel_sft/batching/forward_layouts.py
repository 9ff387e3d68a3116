"""Layouts of a forward (prefixes that its rows share, packed, padded): token order, attention mask, what it costs.

A layout is an object that orders rows, counts what they cost and makes their tensors. One is added by a class or an
instance in `LAYOUTS`.
"""

import abc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
from accel_sft.chat.encoding import Encoded
from accel_sft.models.prefix_attention import installed

FILLED = 2
"""Times a forward's tokens that its rows, filled up to the longest of them, may take in attention row by row."""


class Layout(abc.ABC):
    """Rows of one forward. As it stands: rows in one sequence, which have nothing in common.

    Attributes:
        name: as `--batching` takes it: `shared` rows share tokens, and with them dropout masks; all but `padded` rows
            stand in one sequence, where they must not see each other.
        attention: how attention separates the rows, as a batching's record names it.
        implementation: transformers' attention that can separate them so, as a pattern of its name.
        cpu_tokens: of one forward, to choose from on a CPU, where nothing is tried.
    """

    attention: str
    implementation: str
    cpu_tokens: tuple[int, ...] = (256, 512, 1024)

    def __init__(self, name: str) -> None:
        self.name, self.shares, self.one_sequence = name, name == "shared", name != "padded"

    def order(self, example: Encoded) -> tuple[Any, int]:
        """By what the rows of a step are sorted before they are divided among forwards."""
        return -len(example.input_ids), example.index

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        """Leading tokens of each row that stand in the forward already when it is the row's turn."""
        return [0] * min(len(examples), 1) + [self.prefix(examples)] * (len(examples) - 1)

    def prefix(self, examples: Sequence[Encoded]) -> int:
        """Leading tokens that stand in the forward once, before what each row has of its own."""
        return 0

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Whether the forward's memory stays near what `tokens` take."""
        return True

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        """Tokens that a forward of these examples, in this order, computes."""
        return sum(len(example.input_ids) for example in examples) - sum(self.common(examples))

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        """Pairs of a query and a key that attention computes in a forward of these examples, in this order.

        Each row's own tokens meet the one prefix and the row, both filled up to the longest row.
        """
        longest, prefix = _longest(examples), self.prefix(examples)
        return prefix**2 + len(examples) * (longest - prefix) * longest

    @abc.abstractmethod
    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        """The tensors of one forward of at least one example, on the current device."""


class Tree(Layout):
    """Rows in lexicographic order behind the prefixes they share, with a mask of who sees whom.

    Args:
        mask: the mask from where each token's subtree ends, for attention of this `implementation`.
    """

    def __init__(self, name: str, attention: str, implementation: str, mask: Callable[[torch.Tensor], Any]) -> None:
        super().__init__(name)
        self.attention, self.implementation, self.mask = attention, implementation, mask

    def order(self, example: Encoded) -> tuple[Any, int]:
        return (example.input_ids, example.index) if self.shares else super().order(example)

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        if not self.shares:
            return super().common(examples)
        pairs = itertools.pairwise(example.input_ids for example in examples)
        return [0] * min(len(examples), 1) + list(itertools.starmap(_in_common, pairs))

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        return self.tokens_in(examples) ** 2

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.tree(examples, self.common(examples), self.mask)


class RowByRow(Layout):
    """Attention runs row by row behind the one prefix that all rows of the forward share, in any order."""

    attention, implementation = "rows", "sdpa"
    cpu_tokens = (1024, 2048, 4096)

    def prefix(self, examples: Sequence[Encoded]) -> int:
        if not self.shares or len(examples) < 2:
            return 0
        prefix = examples[0].input_ids
        for row in examples[1:]:
            if row.input_ids[: len(prefix)] != prefix:
                prefix = prefix[: _in_common(prefix, row.input_ids)]
        return min(len(prefix), *(len(row.input_ids) - 1 for row in examples))  # each keeps a token of its own

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Attention fills rows up to the longest."""
        own = _longest(examples) - self.prefix(examples)
        return len(examples) * own <= max(FILLED * tokens, own)

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
    """Rows one below the other, padded at the right: what every model is trained with."""

    attention, implementation = "mask", "*"
    cpu_tokens = (1024, 4096)

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * _longest(examples)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int) -> Batch:
        return collate.padded(examples, pad_token_id)


LAYOUTS: tuple[Layout, ...] = (
    RowByRow("shared"),
    Tree("shared", "mask", "sdpa", collate.dense_mask),
    Tree("shared", "blocks", "flex_attention", collate.block_mask),
    RowByRow("packed"),
    Tree("packed", "mask", "sdpa", collate.dense_mask),
    Tree("packed", "blocks", "flex_attention", collate.block_mask),
    Varlen("packed"),
    Padded("padded"),
)
"""In the order in which they are tried on a model."""
WHAT = {"shared": "one copy of what rows share", "packed": "rows in one sequence", "padded": "each row by itself"}
"""The layouts in words, for messages."""


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


def _longest(examples: Sequence[Encoded]) -> int:
    return max((len(example.input_ids) for example in examples), default=0)
