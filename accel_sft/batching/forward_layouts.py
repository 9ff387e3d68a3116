"""Layouts of a forward (rows that share prefixes, packed, padded): order of tokens, attention mask, cost.

A layout is an object that orders rows, counts what they cost and makes their tensors. To add one, put
an instance, of a new class if need be, into `LAYOUTS`.
"""

import abc
import fnmatch
import itertools
from collections.abc import Sequence
from typing import Any

from accel_sft.batching import collate
from accel_sft.batching.collate import Batch
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
