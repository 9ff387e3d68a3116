"""Attention of many rows to one prefix, without a copy of the prefix for each row, by torch's fused kernels.

Attention within the prefix and within each row, and the rows' attention to the prefix, are computed apart, each with
its log-sum-exp, and added up in the proportions of their exponential sums ("cascade", as in Ye et al., FlashInfer,
2024). In the backward, given the log-sum-exp of the whole, each part yields its share of the whole's gradient ("ring",
as in Liu et al., 2023, arXiv 2310.01889), so that only the whole's output is kept.

On CPUs the kernels take sequences of one length, so rows are padded. On CUDA devices they take sequences of any length
one after another, as `torch.nn.attention.varlen` does; that has no gradient of the log-sum-exp, which is needed here.
"""

import abc
import dataclasses
from typing import Any

import torch
from torch.nn import functional

SHORT = 256
"""Most keys of a row whose attention has its backward in float32 on a CPU, if it is in half precision. In that, torch
2.13 spends a tenth of a millisecond on each head of each row, whatever its length, in setting up products: with 16 to
128 keys ten times as long as all of it takes in float32; with 512 no longer (EPYC with avx512_bf16, one thread)."""


@dataclasses.dataclass(frozen=True)
class PrefixedRows:
    """Where the rows of a sequence stand: `prefix` tokens seen by all, then the own tokens of one row after another.

    Attributes:
        prefix: number of the prefix's tokens, P; may be 0.
        longest: number of own tokens of the longest row, L.
        own: for each place of the R rows padded to L: which token after the prefix stands there, (R * L,); a shorter
            row repeats its last token.
        back: for each of the N tokens after the prefix: its place in `own`, (N,).
        bounds: where the prefix, if there is one, and each row begin, and where the last row ends; int32.
        behind: 0 and N: the bounds of all rows as one sequence; int32.
    """

    prefix: int
    longest: int
    own: torch.Tensor
    back: torch.Tensor
    bounds: torch.Tensor
    behind: torch.Tensor


class Kernels(abc.ABC):
    """Fused attention of a kind of device, and its backward.

    Query is (tokens, heads, D), and so is the output; key and value are what `alike` makes of them; log-sum-exps are
    (tokens, heads). A backward takes the output's gradient, query, key, value, output and log-sum-exps, and returns
    gradients of query, key and value.

    Attributes:
        dtype: type of the small example on which the kernels are checked.
        tolerance: largest allowed difference from plain attention, as a share of its norm; above it, the kernels are
            not used.
        sizes: sizes of a head that have kernels of their own on a device; sizes in between use the next larger one.
    """

    dtype: torch.dtype
    tolerance: float
    sizes: tuple[int, ...]

    @abc.abstractmethod
    def size_for(self, dtype: torch.dtype, head_size: int) -> int | None:
        """The one of `sizes` that serves heads of this type and size; None if there is none."""

    def alike(self, query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        """The query, and keys and values with as many heads as the kernels need; they have them already by default."""
        return [query, *others]

    def grouped(self, key_heads: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Gradients with as many heads as keys and values had before `alike`."""
        return gradients

    @abc.abstractmethod
    def within(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Causal attention of the prefix to itself and of each row to itself; returns output and log-sum-exps."""

    @abc.abstractmethod
    def within_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        """The backward of `within`."""

    @abc.abstractmethod
    def across(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Attention of all rows' tokens to the prefix; returns output and log-sum-exps."""

    @abc.abstractmethod
    def across_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        """The backward of `across`."""


class Padded(Kernels):
    """torch's fused attention on CPUs: sequences of one length, as many heads of keys as of queries, any type."""

    dtype, tolerance, sizes = torch.float32, 1e-4, (8,)

    def size_for(self, dtype: torch.dtype, head_size: int) -> int | None:
        return 8

    def alike(self, query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        times = query.shape[1] // others[0].shape[1]
        return [query, *(tensor.repeat_interleave(times, dim=1) if times > 1 else tensor for tensor in others)]

    def grouped(self, key_heads: int, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        query, *others = gradients
        if key_heads == query.shape[1]:
            return gradients
        return [query, *(tensor.unflatten(1, (key_heads, -1)).sum(2) for tensor in others)]

    def within(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        prefix = rows.prefix
        cut = (cut_rows(tensor[prefix:], rows) for tensor in qkv)
        own = self._forward(*cut, is_causal=True, scale=scale)
        parts = [[_back(tensor, rows) for tensor in own]]
        if prefix:
            parts.insert(0, self._one(*(tensor[:prefix] for tensor in qkv), is_causal=True, scale=scale))
        output, sums = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return output, sums

    def within_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        prefix, (gradient, *others) = rows.prefix, saved
        # the output at padding gets a gradient of zero, so padding contributes nothing
        filled = gradient.new_zeros(len(rows.own), *gradient.shape[1:])
        filled[rows.back] = gradient[prefix:]
        cut = [cut_rows(tensor[prefix:], rows) for tensor in others]
        gradients = self._backward(_batch(filled, rows.longest), *cut, is_causal=True, scale=scale)
        parts = [[_back(tensor, rows) for tensor in gradients]]
        if prefix:
            parts.insert(0, self._one_backward(*(tensor[:prefix] for tensor in saved), is_causal=True, scale=scale))
        return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

    def across(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, sums = self._one(*qkv, is_causal=False, scale=scale)
        return output, sums

    def across_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        return self._one_backward(*saved, is_causal=False, scale=scale)

    def _one(self, *qkv: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        """Attention of one sequence."""
        outputs = self._forward(*(tensor.transpose(0, 1)[None] for tensor in qkv), **how)
        return [tensor[0].transpose(0, 1) for tensor in outputs]

    def _one_backward(self, *saved: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        gradients = self._backward(*(tensor.transpose(0, 1)[None] for tensor in saved), **how)
        return [tensor[0].transpose(0, 1) for tensor in gradients]

    def _forward(self, *qkv: torch.Tensor, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv, **how)
        return output, sums

    def _backward(self, *saved: torch.Tensor, **how: Any) -> list[torch.Tensor]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        *tensors, sums = saved
        dtype, keys = tensors[0].dtype, tensors[2].shape[2]
        if dtype.itemsize < 4 and keys <= SHORT:
            tensors = [tensor.float() for tensor in tensors]
        return [gradient.to(dtype) for gradient in kernel(*tensors, sums, dropout_p=0.0, **how)]


class Varlen(Kernels):
    """torch's FlashAttention on CUDA devices: sequences of any length, given by their bounds; half precision."""

    dtype, tolerance, sizes = torch.bfloat16, 2e-2, (32, 64, 96, 128, 192, 256)

    def size_for(self, dtype: torch.dtype, head_size: int) -> int | None:
        if head_size % 8 or dtype not in (torch.bfloat16, torch.float16):
            return None
        return next((size for size in self.sizes if head_size <= size), None)

    def within(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._forward(qkv, *self._own(rows), True, scale)

    def within_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        return self._backward(saved, *self._own(rows), True, scale)

    def across(self, rows: PrefixedRows, scale: float | None, *qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self._forward(qkv, *self._before(rows), False, scale)

    def across_backward(self, rows: PrefixedRows, scale: float | None, *saved: torch.Tensor) -> list[torch.Tensor]:
        return self._backward(saved, *self._before(rows), False, scale)

    def _own(self, rows: PrefixedRows) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Bounds and largest number of queries and of keys, where each sequence attends to itself."""
        # for a single query the kernel would regroup the heads, and with them the log-sum-exps
        longest = max(rows.prefix, rows.longest, 2)
        return rows.bounds, rows.bounds, longest, longest

    def _before(self, rows: PrefixedRows) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """The same where all rows, as one sequence, attend to the prefix."""
        return rows.behind, rows.bounds[:2], max(len(rows.back), 2), rows.prefix

    def _forward(self, qkv: tuple[torch.Tensor, ...], *where: Any) -> tuple[torch.Tensor, ...]:
        *bounds, causal, scale = where
        kernel = torch.ops.aten._flash_attention_forward
        output, sums, *_ = kernel(*qkv, *bounds, 0.0, causal, False, scale=scale)
        return output, sums.T

    def _backward(self, saved: tuple[torch.Tensor, ...], *where: Any) -> list[torch.Tensor]:
        *bounds, causal, scale = where
        *others, sums = saved
        # without dropout neither random state is read
        random = sums.new_empty(2, dtype=torch.uint64), sums.new_empty(0)
        kernel = torch.ops.aten._flash_attention_backward
        return [*kernel(*others, sums.T.contiguous(), *bounds, 0.0, causal, *random, scale=scale)]


PADDED, VARLEN = Padded(), Varlen()
KERNELS: dict[str, Kernels] = {"cpu": PADDED, "cuda": VARLEN}
"""The kernels for each type of device; other types have none."""


def cut_rows(tensor: torch.Tensor, rows: PrefixedRows) -> torch.Tensor:
    """Cut out rows, and pad them to the longest, L: (N, heads, ...) -> (R, heads, L, ...)."""
    return _batch(tensor.index_select(0, rows.own), rows.longest)


def _batch(tensor: torch.Tensor, longest: int) -> torch.Tensor:
    """(R * L, heads, ...) -> (R, heads, L, ...)."""
    return tensor.unflatten(0, (-1, longest)).transpose(1, 2)


def _back(tensor: torch.Tensor, rows: PrefixedRows) -> torch.Tensor:
    """(R, heads, L, ...) -> (N, heads, ...)."""
    return tensor.transpose(1, 2).flatten(0, 1).index_select(0, rows.back)


_right: dict[tuple[str, int], bool] = {}
"""Whether the kernels of a type of device, for heads up to this size, are there and compute right; set by a probe."""


def kernels_for(device: str, dtype: torch.dtype, head_size: int, prefix: bool) -> Kernels | None:
    """The kernels of a type of device that the probe found right for such heads; None if there are none, or where rows
    are padded anyway and share no prefix: plain attention is faster then."""
    kernels = KERNELS.get(device)
    if kernels is None or (kernels is PADDED and not prefix):
        return None
    return kernels if _right.get((device, kernels.size_for(dtype, head_size) or 0)) else None


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, prefix: int) -> Kernels | None:
    """The kernels that take these tensors; None if there are none."""
    if not (query.dtype == key.dtype == value.dtype and query.shape[-1] == value.shape[-1]):
        return None
    return kernels_for(query.device.type, query.dtype, query.shape[-1], prefix > 0)


class _Cascade(torch.autograd.Function):
    """Causal attention over a prefix and the rows that follow it: each row sees the prefix and itself, no other row.

    Args:
        query: (1, heads, P + N, D): the prefix, then the N tokens of all rows; key and value may have fewer heads.
        scale: factor on the products of queries and keys; None: 1 / sqrt(D).
    Returns:
        (1, P + N, heads, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PrefixedRows,
        scale: float | None,
        kernels: Kernels,
    ) -> torch.Tensor:
        prefix = rows.prefix
        query_, key_, value_ = qkv = kernels.alike(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        output, sums = kernels.within(rows, scale, *qkv)
        if prefix:
            before, before_sums = kernels.across(rows, scale, query_[prefix:], key_[:prefix], value_[:prefix])
            own, own_sums = output[prefix:], sums[prefix:]
            both_sums = torch.logaddexp(before_sums, own_sums)  # (N, heads)
            of_before, of_own = ((sums - both_sums).exp()[..., None] for sums in (before_sums, own_sums))
            own.copy_(before * of_before + own * of_own)
            own_sums.copy_(both_sums)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.rows, ctx.scale, ctx.kernels = rows, scale, kernels
        return output[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        rows, scale, prefix = ctx.rows, ctx.scale, ctx.rows.prefix
        key_heads = key.shape[1]
        alike = ctx.kernels.alike(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        saved = gradients[0][0], *alike, output, sums
        of_qkv = ctx.kernels.within_backward(rows, scale, *saved)
        if prefix:
            of_prefix, of_rows = slice(prefix), slice(prefix, None)
            parts = of_rows, of_rows, of_prefix, of_prefix, of_rows, of_rows  # keys and values are the prefix's
            before = (tensor[part] for tensor, part in zip(saved, parts, strict=True))
            shares = ctx.kernels.across_backward(rows, scale, *before)
            for gradient, share, part in zip(of_qkv, shares, (of_rows, of_prefix, of_prefix), strict=True):
                gradient[part] += share
        of_qkv = ctx.kernels.grouped(key_heads, of_qkv)
        return (*(gradient.transpose(0, 1)[None] for gradient in of_qkv), None, None, None)


cascade = _Cascade.apply


def probe_kernels(device: torch.device) -> None:
    """Find out, once, whether a device has its type's kernels, and whether they compute a small example, its gradients
    included, right.

    Call it outside any forward, where no compiler, autograd mode or default device of the model is in effect.
    """
    kernels = KERNELS.get(device.type)
    if kernels is None or (device.type, kernels.sizes[0]) in _right:
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        _right.update({(device.type, size): _is_right(kernels, device, size) for size in kernels.sizes})


def _is_right(kernels: Kernels, device: torch.device, size: int) -> bool:
    drawn = torch.Generator("cpu").manual_seed(0)
    shapes = [(1, heads, 8, size) for heads in (4, 2, 2)]
    row = torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1], device="cpu")  # a prefix of three, rows of three and of two
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    own, back = ([0, 1, 2, 3, 4, 4], torch.long), ([0, 1, 2, 3, 4], torch.long)
    bounds, behind = ([0, 3, 6, 8], torch.int32), ([0, 5], torch.int32)
    try:
        tensors = [torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu") for shape in shapes]
        tensors = [tensor.to(device, kernels.dtype).requires_grad_() for tensor in tensors]
        places = (torch.tensor(numbers, dtype=dtype, device=device) for numbers, dtype in (own, back, bounds, behind))
        ours = cascade(*tensors, PrefixedRows(3, 3, *places), None, kernels)
        computed = [ours, *torch.autograd.grad(ours.float().square().sum(), tensors)]
        exact = [tensor.detach().float().cpu().requires_grad_() for tensor in tensors]
        query, key, value = exact[0], *(tensor.repeat_interleave(2, dim=1) for tensor in exact[1:])
        plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)
        expected = [plain, *torch.autograd.grad(plain.square().sum(), exact)]
        pairs = [(one.float().cpu(), other) for one, other in zip(computed, expected, strict=True)]
    except torch.OutOfMemoryError:  # which says nothing about the kernels
        raise
    # another torch may lack the kernels or give them other arguments, a device may lack them; the prefix is then
    # copied, which is as exact
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return False
    return all(bool((a - b).norm() <= kernels.tolerance * b.norm()) for a, b in pairs)
