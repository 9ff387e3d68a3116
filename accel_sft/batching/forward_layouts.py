"""Layouts of a forward (shared prefixes, packed, padded): token order, attention mask, which models fit.

A layout is an object that orders rows, counts what they cost, makes their tensors, and says why a model cannot take it.
One is added by a class or an instance in `LAYOUTS`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
from accel_sft.batching.prefixes import common_prefix, common_prefixes
from accel_sft.data.chat import Encoded
from accel_sft.models.architecture import arguments, limited_layers
from accel_sft.models.prefix_attention import install, installed

FILLED = 2
"""Times a forward's tokens that its rows, filled up to the longest of them, may take in attention row by row."""


class Layout(abc.ABC):
    """Rows of one forward. As it stands: rows in one sequence, which have nothing in common.

    Attributes:
        name: as `--batching` takes it.
        attention: how attention separates the rows, as a batching's record names it.
        shares: whether rows share tokens, and with them dropout masks.
        one_sequence: whether rows stand in one sequence, where they must not see each other.
        what: for messages.
    """

    attention: str
    one_sequence = True

    def __init__(self, *, shares: bool = False) -> None:
        self.shares = shares
        self.name = "shared" if shares else "packed"
        self.what = "one copy of what rows share" if shares else "rows in one sequence"

    def order(self, example: Encoded) -> tuple[Any, int]:
        """By what the rows of a step are sorted before they are divided among forwards."""
        return -len(example.input_ids), example.index

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        """Leading tokens of each row that stand in the forward already when it is the row's turn."""
        return [0] * len(examples)

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Whether the forward's memory stays near what `tokens` take."""
        return True

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        """Tokens that a forward of these examples, in this order, computes."""
        return sum(len(example.input_ids) for example in examples) - sum(self.common(examples))

    def grown(self, tokens: int, rows: int, longest: int, own: int) -> int:
        """Tokens of a forward of `tokens` and `rows` after one more, no longer row with `own` tokens not there yet."""
        return tokens + own

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        """Pairs of a query and a key that attention computes in a forward of these examples, in this order."""
        return self.tokens_in(examples) ** 2

    @abc.abstractmethod
    def collate(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        """The tensors of one forward of at least one example."""

    @abc.abstractmethod
    def takes(self, implementation: str) -> bool:
        """Whether transformers' attention of this name can separate rows in this way."""

    def prepare(self) -> None:  # noqa: B027 - most layouts need nothing
        """Called before the first forward of a model in this layout."""

    def reason_unsupported(self, model: torch.nn.Module, longest: int) -> str | None:
        """Why the model cannot take rows up to this long, as far as its configuration tells; None if nothing is wrong.

        That it computes them as single rows is measured in `verify`.
        """
        if "position_ids" not in arguments(model):
            return "the model takes no positions"
        limited = limited_layers(model, longest)
        return f"the model has layers of another kind ({limited})" if limited else None


class Tree(Layout):
    """Rows in lexicographic order behind the prefixes they share, with a mask of who sees whom.

    Args:
        mask: the mask from where each token's subtree ends.
        implementation: transformers' attention that takes it.
    """

    def __init__(
        self, attention: str, implementation: str, mask: Callable[[torch.Tensor], Any], *, shares: bool
    ) -> None:
        super().__init__(shares=shares)
        self.attention, self.implementation, self.mask = attention, implementation, mask

    def order(self, example: Encoded) -> tuple[Any, int]:
        return (example.input_ids, example.index) if self.shares else super().order(example)

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        return common_prefixes(examples) if self.shares else super().common(examples)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        return collate.tree(examples, self.common(examples), device, self.mask)

    def takes(self, implementation: str) -> bool:
        return implementation == self.implementation


class RowByRow(Layout):
    """Attention runs row by row behind the one prefix that all rows of the forward share, in any order."""

    attention = "rows"

    def common(self, examples: Sequence[Encoded]) -> list[int]:
        if not self.shares or not examples:
            return super().common(examples)
        return [0] + [common_prefix(examples)] * (len(examples) - 1)

    def is_even(self, examples: Sequence[Encoded], tokens: int) -> bool:
        """Attention fills rows up to the longest."""
        if not examples:
            return True
        longest = max(len(example.input_ids) for example in examples)
        if len(examples) * longest <= FILLED * tokens:
            return True
        own = longest - min(self.common(examples)[1:], default=0)
        return len(examples) * own <= max(FILLED * tokens, own)

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        return _pairs_of_rows(self, examples)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        if len(examples) == 1:
            return collate.tree(examples, [0], device)
        if not installed():
            raise RuntimeError("attention by rows: call prefix_attention.install() before the model's forwards")
        return collate.behind_prefix(examples, self.common(examples)[1], device)

    def takes(self, implementation: str) -> bool:
        return implementation == "sdpa"

    def prepare(self) -> None:
        install()


class Varlen(Layout):
    """Rows one after another, with their bounds for FlashAttention."""

    attention = "varlen"

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        return _pairs_of_rows(self, examples)

    def collate(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        return collate.varlen(examples, device)

    def takes(self, implementation: str) -> bool:
        return implementation.startswith("flash")


class Padded(Layout):
    """Rows one below the other, padded at the right: what every model is trained with."""

    attention = "mask"
    one_sequence = False

    def __init__(self) -> None:
        super().__init__()
        self.name, self.what = "padded", "each row by itself"

    def tokens_in(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * max((len(example.input_ids) for example in examples), default=0)

    def grown(self, tokens: int, rows: int, longest: int, own: int) -> int:
        return longest * (rows + 1)

    def attended_pairs(self, examples: Sequence[Encoded]) -> int:
        return len(examples) * max((len(example.input_ids) for example in examples), default=0) ** 2

    def collate(self, examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> Batch:
        return collate.padded(examples, pad_token_id, device)

    def takes(self, implementation: str) -> bool:
        return True

    def reason_unsupported(self, model: torch.nn.Module, longest: int) -> str | None:
        return None


def _pairs_of_rows(layout: Layout, examples: Sequence[Encoded]) -> int:
    """Each row's own tokens meet the prefix and the row, both filled up to the longest row."""
    if len(examples) < 2:
        return layout.tokens_in(examples) ** 2
    longest, common = max(len(example.input_ids) for example in examples), layout.common(examples)[1]
    return common**2 + len(examples) * (longest - common) * longest


LAYOUTS: tuple[Layout, ...] = (
    RowByRow(shares=True),
    Tree("mask", "sdpa", collate.dense_mask, shares=True),
    Tree("blocks", "flex_attention", collate.block_mask, shares=True),
    RowByRow(),
    Tree("mask", "sdpa", collate.dense_mask, shares=False),
    Tree("blocks", "flex_attention", collate.block_mask, shares=False),
    Varlen(),
    Padded(),
)
"""In the order in which they are tried on a model."""
