"""Defines `ModelShape`, a model's parameters by group and by block, for estimates of memory. Without torch."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.limits import names_of

SavedBytes = Callable[[int, int], float]
"""Maps bytes per element and tokens of a row to the bytes that the row keeps in a recurrent layer."""
ALL_LINEAR = "all-linear"
"""The value of --lora-target-modules that means every linear layer except the head."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix of a block, named after its module, such as `q_proj`.

    Attributes:
        group: `attention`, `recurrent`, `feed_forward` or `experts`.
        copies: how many equal matrices the block has, fused in one tensor (experts).
        active: how many of the copies each token goes through.
        is_linear: whether this is a linear layer, to which an adapter can be added.
        lora_ranks: rank that LoRA on all linear layers gives each copy, in multiples of --lora-r.
    """

    name: str
    inputs: int
    outputs: int
    group: str
    bias: bool = False
    copies: int = 1
    active: int = 1
    is_linear: bool = True
    lora_ranks: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * self.outputs * (self.inputs + self.bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """A kind of block; the model has `count` blocks of this kind. `vectors` is the number of elements of one block's
    norms. `recurrent` measures one block's recurrent layers; it is empty if that is impossible."""

    count: int
    matrices: tuple[Matrix, ...]
    vectors: int
    recurrent: tuple[SavedBytes, ...] = dataclasses.field(default=(), compare=False)

    @property
    def parameters(self) -> int:
        """Number of parameters of one block."""
        return self.vectors + sum(matrix.parameters for matrix in self.matrices)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tower:
    """A vision transformer: elements of a patch's hidden state (`width`) and in the feed-forward (`inner`), number of
    blocks (`depth`), and pixel values of a patch, with its colors and frames (`values`; 0: unknown)."""

    width: int
    inner: int
    depth: int
    values: int


def tower(vision: Mapping[str, Any]) -> Tower | None:
    """The vision tower of config.json, whose sizes may be named as in Qwen, CLIP or SigLIP; None without sizes."""

    def first(*names: str, otherwise: int = 0) -> int:
        size = next((vision[name] for name in names if vision.get(name)), otherwise)
        return int(size[0] if isinstance(size, (list, tuple)) else size)

    width, depth = first("embed_dim", "hidden_size"), first("depth", "num_hidden_layers")
    if not width or not depth:
        return None
    share = vision.get("mlp_ratio") or (0 if vision.get("intermediate_size") else 4)
    inner = int(width * share) or first("intermediate_size")
    frames = first("temporal_patch_size", otherwise=2 if "spatial_merge_size" in vision else 1)
    colours = first("in_channels", "in_chans", "num_channels", otherwise=3)
    return Tower(width=width, inner=inner, depth=depth, values=colours * frames * first("patch_size") ** 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal language model's shape. Counts are of parameters, not of bytes.

    Attributes:
        tied: whether the head is the embedding itself.
        vectors: number of elements outside of blocks, embedding and head matrix (the last norm, the head's bias).
        other: number of parameters that text does not use (a vision tower's); frozen unless --train-only names them.
        tower: the vision tower; None without one, or if its sizes are not known.
    """

    family: str
    hidden_size: int
    vocab_size: int
    heads: int
    key_value_heads: int
    head_dim: int
    tied: bool
    blocks: tuple[Block, ...]
    vectors: int
    other: int = 0
    tower: Tower | None = None

    @property
    def layers(self) -> int:
        return sum(block.count for block in self.blocks)

    @property
    def matrices(self) -> list[tuple[int, Matrix]]:
        """Each matrix of each kind of block, with the number of blocks of this kind."""
        return [(block.count, matrix) for block in self.blocks for matrix in block.matrices]

    @property
    def ends(self) -> int:
        """Number of parameters of embedding and head."""
        return (1 if self.tied else 2) * self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of all parameters, tied ones counted once."""
        return self.ends + self.vectors + self.other + sum(block.count * block.parameters for block in self.blocks)

    @property
    def active_parameters(self) -> int:
        """Number of parameters in blocks and head that a token uses; of experts, only the chosen ones."""
        inside = sum(count * m.active * m.inputs * m.outputs for count, m in self.matrices)
        return inside + self.vocab_size * self.hidden_size

    @property
    def largest_block(self) -> int:
        return max((block.parameters for block in self.blocks), default=0)

    @property
    def largest_tensor(self) -> int:
        """Number of parameters of the largest single tensor: usually the embedding."""
        return max(size for _, size in self.tensors())

    def tensors(self) -> Iterator[tuple[int, int]]:
        """Yield, for all tensors but vectors, the number of equal tensors and the number of elements of each."""
        yield (1 if self.tied else 2), self.vocab_size * self.hidden_size
        yield from ((count, m.copies * m.inputs * m.outputs) for count, m in self.matrices)

    @property
    def linear(self) -> int:
        """Number of elements of the linear layers in blocks; a 4-bit base model has these in 4 bits."""
        return sum(count * m.inputs * m.outputs for count, m in self.matrices if m.is_linear)

    def trained(
        self,
        adapter: str = "none",
        lora_r: int = 8,
        target_modules: str = ALL_LINEAR,
        target_parameters: str | None = None,
        modules_to_save: str | None = None,
    ) -> int:
        """Number of parameters that are trained: all but `other`, or those of an adapter's matrices. Arguments are the
        values of `--adapter`, `--lora-r` and so on; UserError for a target that no block has."""
        if adapter == "none":
            return self.parameters - self.other
        vector, rank = 0, lora_r
        if adapter == "adalora":  # AdaLoRA starts with a larger rank, and has a vector too
            vector, rank = 1, lora_r * 3 // 2 + 1
        saved = set(names_of(modules_to_save))
        adapted = [m for m in self.adapted(adapter, target_modules) if m[2].name not in saved]
        wanted = {name.rpartition(".")[2] for name in names_of(target_parameters)}
        adapted += [(count * m.copies, 1, m) for count, m in self.matrices if m.name in wanted]
        if missing := wanted - {matrix.name for *_, matrix in adapted}:
            raise UserError(f"--lora-target-parameters {', '.join(sorted(missing))}: no block has such a parameter")
        return sum(count * ranks * rank * (m.inputs + m.outputs + vector) for count, ranks, m in adapted)

    def cut(self, ranks: int) -> "ModelShape":
        """The shape of one rank's part under tensor parallelism: the inner widths of attention and feed-forward are
        divided; hidden states, norms and the vocabulary's logits are whole."""

        def part(matrix: Matrix) -> Matrix:
            if matrix.inputs == self.hidden_size and matrix.outputs > 1:
                return dataclasses.replace(matrix, outputs=matrix.outputs // ranks)
            return dataclasses.replace(matrix, inputs=matrix.inputs // ranks)

        blocks = tuple(
            dataclasses.replace(block, matrices=tuple(m if m.name == "gate" else part(m) for m in block.matrices))
            for block in self.blocks
        )
        heads, key_value_heads = self.heads // ranks, self.key_value_heads // ranks
        return dataclasses.replace(self, blocks=blocks, heads=heads, key_value_heads=key_value_heads)

    def saved(self, modules_to_save: str | None) -> int:
        """Number of parameters of the modules that `--lora-modules-to-save` names; UserError for a module that is not
        counted separately."""
        sizes = dict.fromkeys(("embed_tokens", "lm_head"), self.vocab_size * self.hidden_size)
        named = {name.rpartition(".")[2] for name in names_of(modules_to_save)}
        if self.tied and named >= sizes.keys():
            named -= {"embed_tokens"}
        for count, matrix in self.matrices:
            sizes[matrix.name] = sizes.get(matrix.name, 0) + count * matrix.parameters
        if unknown := ", ".join(sorted(named - sizes.keys())):
            raise UserError(f"--lora-modules-to-save {unknown}: of unknown size; known are only {', '.join(sizes)}")
        return sum(sizes[name] for name in named)

    def adapted(self, adapter: str, target_modules: str = ALL_LINEAR) -> Iterator[tuple[int, int, Matrix]]:
        """Yield, for each matrix that an adapter is put on, its count in the model, its rank in units of --lora-r, and
        the matrix; UserError for a target module that no block has."""
        names = set(names_of(target_modules))
        linear = dict.fromkeys(m.name for _, m in self.matrices if m.is_linear)
        if names != {ALL_LINEAR} and (missing := ", ".join(sorted(names - linear.keys()))):
            raise UserError(f"--lora-target-modules {missing}: no such module; choose from {', '.join(linear)}")
        for count, matrix in self.matrices:
            in_lora = adapter == "lora" and names == {ALL_LINEAR} and matrix.lora_ranks
            if in_lora or (matrix.is_linear and (names == {ALL_LINEAR} or matrix.name in names)):
                yield count * matrix.copies, matrix.lora_ranks, matrix
