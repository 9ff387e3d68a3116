"""Computes attention of many rows to one prefix with torch's fused kernels, without copying the prefix for each row.

Three parts are computed separately, each with its log-sum-exp: attention within the prefix, attention within each row,
and the rows' attention to the prefix. The last two are added in proportion to their exponential sums ("cascade", as in
Ye et al., FlashInfer, 2024). In the backward, each part computes its share of the gradient from the log-sum-exp of the
sum ("ring", as in Liu et al., 2023, arXiv 2310.01889), so that only the output of the sum is kept.

Rows are padded at the end to one length, so the causal mask hides the padding from a row's tokens.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional

SHORT = 256
"""On a CPU in half precision, attention's backward runs in float32 for rows of at most this many keys. In half
precision, torch 2.13 spends 0.1 ms per head and row on setting up products. The whole backward in float32 takes a tenth
of this time with 16 to 128 keys, and at least as long with 512 (EPYC with avx512_bf16, one thread)."""
_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 192
"""Largest head dimension for which FlashAttention has a backward on every GPU."""


@dataclasses.dataclass(frozen=True)
class PrefixedRows:
    """How R rows lie in one sequence. First come the P tokens of the `prefix` (P may be 0), which all rows see. The N
    tokens of the rows follow, row after row; the `longest` row has L tokens.

    Attributes:
        own: for each position of the rows padded to length L, the index of its token among the N tokens, (R * L,).
            Padding repeats a row's last token.
        back: for each of the N tokens, its position in `own`, (N,).
        again: positions in `own` of tokens that a second row repeats, such as the prompt of a pair; the first row of
            these tokens has their output, (M,).
    """

    prefix: int
    longest: int
    own: torch.Tensor
    back: torch.Tensor
    again: torch.Tensor


def _forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, sums = kernel(query, key, value, is_causal=causal, scale=scale)
    return output, sums


def _backward_on_cpu(*saved: torch.Tensor, causal: bool, scale: float | None) -> list[torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    *tensors, sums = saved
    dtype, keys = tensors[0].dtype, tensors[2].shape[2]
    if dtype in _HALF and keys <= SHORT:
        tensors = [tensor.float() for tensor in tensors]
    return [gradient.to(dtype) for gradient in kernel(*tensors, sums, 0.0, causal, scale=scale)]


def _forward_on_gpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention
    output, sums, *_ = kernel(query, key, value, 0.0, causal, scale=scale)
    return output, sums


def _backward_on_gpu(*saved: torch.Tensor, causal: bool, scale: float | None) -> list[torch.Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
    *tensors, sums = saved
    queries, keys = tensors[1].shape[2], tensors[2].shape[2]
    random = sums.new_empty(2, dtype=torch.uint64), sums.new_empty(0)  # neither is read without dropout
    lengths = None, None, queries, keys  # no sequence bounds, as nothing is packed
    return [*kernel(*tensors, sums.contiguous(), *lengths, 0.0, causal, *random, scale=scale)]


class Kernels(NamedTuple):
    """Fused attention for a type of device, and its backward. A probe compares their results with plain attention's in
    `dtype`; the norm of the difference may be at most `tolerance` times that of the result.

    Queries, keys, values and outputs are (B, heads, T, D), and log-sum-exps (B, heads, T). `backward` takes the
    output's gradient, query, key, value, output and log-sum-exps, and returns the gradients of query, key and value.
    """

    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[..., list[torch.Tensor]]
    dtype: torch.dtype
    tolerance: float


KERNELS = {
    "cpu": Kernels(_forward_on_cpu, _backward_on_cpu, torch.float32, 1e-4),
    "cuda": Kernels(_forward_on_gpu, _backward_on_gpu, torch.bfloat16, 2e-2),
}
"""The kernels for each type of device; other types have none."""


def cut_rows(tensor: torch.Tensor, rows: PrefixedRows) -> torch.Tensor:
    """Cut out the rows, and pad them to length L: (1, heads, P + N, ...) -> (R, heads, L, ...)."""
    own = tensor[0, :, rows.prefix :].transpose(0, 1).index_select(0, rows.own)
    return own.unflatten(0, (-1, rows.longest)).transpose(1, 2)


def _back(tensor: torch.Tensor, rows: PrefixedRows) -> torch.Tensor:
    """Undo `cut_rows`: (R, heads, L, ...) -> (1, heads, N, ...)."""
    return tensor.transpose(1, 2).flatten(0, 1).index_select(0, rows.back).transpose(0, 1)[None]


def _summed(tensor: torch.Tensor, rows: PrefixedRows) -> torch.Tensor:
    """The gradient of `cut_rows`: (R, heads, L, ...) -> (1, heads, N, ...); a repeated token gets the sum."""
    once = _back(tensor, rows)
    if len(rows.again):
        more = tensor.transpose(1, 2).flatten(0, 1).index_select(0, rows.again).transpose(0, 1)
        once[0, :, rows.own[rows.again]] += more  # no token is repeated twice
    return once


def _same_heads(query: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
    """Return the query, and keys and values repeated to its number of heads."""
    times = query.shape[1] // others[0].shape[1]
    return [query, *(tensor.repeat_interleave(times, dim=1) if times > 1 else tensor for tensor in others)]


_right: dict[str, bool] = {}
"""For each probed type of device, whether its kernels exist and compute correctly."""


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the tensors' device has kernels that support these tensors and passed the probe."""
    kind, size = query.device.type, query.shape[-1]
    fits = kind != "cuda" or (query.dtype in _HALF and size % 8 == 0 and size <= _WIDEST)
    alike = query.dtype == key.dtype == value.dtype and size == value.shape[-1]
    return fits and alike and _right.get(kind, False)


class _Cascade(torch.autograd.Function):
    """Causal attention over a prefix and the rows after it: each row sees the prefix and itself, but no other row.

    The query is (1, heads, P + N, D), key and value may have fewer heads; the output is (1, P + N, heads, D).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PrefixedRows,
        scale: float | None,
    ) -> torch.Tensor:
        attend, prefix = KERNELS[query.device.type].forward, rows.prefix
        q, k, v = qkv = _same_heads(query, key, value)
        first, first_sums = attend(*(tensor[:, :, :prefix] for tensor in qkv), True, scale)
        before, before_sums = attend(q[:, :, prefix:], k[:, :, :prefix], v[:, :, :prefix], False, scale)
        cut = attend(*(cut_rows(tensor, rows) for tensor in qkv), True, scale)
        own, own_sums = (_back(tensor, rows) for tensor in cut)
        both_sums = torch.logaddexp(before_sums, own_sums)  # (1, heads, N)
        of_before, of_own = ((sums - both_sums).exp()[..., None] for sums in (before_sums, own_sums))
        both = (before * of_before + own * of_own).to(first.dtype)
        output, sums = torch.cat([first, both], dim=2), torch.cat([first_sums, both_sums], dim=2)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.rows, ctx.scale = rows, scale
        return output.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        rows, how = ctx.rows, {"scale": ctx.scale}
        attend, prefix = KERNELS[query.device.type].backward, rows.prefix
        gradient = gradients[0].transpose(1, 2)
        saved = gradient, *_same_heads(query, key, value), output, sums
        first = attend(*(tensor[:, :, :prefix] for tensor in saved), causal=True, **how)
        of_prefix, of_rows = slice(prefix), slice(prefix, None)
        parts = of_rows, of_rows, of_prefix, of_prefix, of_rows, of_rows  # rows attend to the prefix
        before = attend(*(tensor[:, :, part] for tensor, part in zip(saved, parts, strict=True)), causal=False, **how)
        # the output at padding gets a gradient of zero, so padding contributes nothing
        padded = gradient.new_zeros(len(rows.own), *gradient.shape[1::2])
        padded[rows.back] = gradient[0, :, prefix:].transpose(0, 1)
        cut = padded.unflatten(0, (-1, rows.longest)).transpose(1, 2), *(cut_rows(tensor, rows) for tensor in saved[1:])
        own = [_summed(tensor, rows) for tensor in attend(*cut, causal=True, **how)]
        of_query = torch.cat([first[0], before[0] + own[0]], dim=2)
        of_others = [torch.cat([first[i] + before[i], own[i]], dim=2) for i in (1, 2)]
        if key.shape[1] < query.shape[1]:
            of_others = [tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in of_others]
        return of_query, *of_others, None, None


cascade = _Cascade.apply


def probe_kernels(device: torch.device) -> None:
    """Check once whether a device has the kernels of its type, and whether these compute a small example and its
    gradients correctly. Call it outside any forward."""
    kernels = KERNELS.get(device.type)
    if kernels is None or device.type in _right:
        return
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        _right[device.type] = _is_right(kernels, device)


def _is_right(kernels: Kernels, device: torch.device) -> bool:
    drawn = torch.Generator("cpu").manual_seed(0)
    shapes = [(1, heads, 8, 16) for heads in (4, 2, 2)]
    row = torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1], device="cpu")  # a prefix of three, rows of three and of two
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    try:
        tensors = [torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu") for shape in shapes]
        tensors = [tensor.to(device, kernels.dtype).requires_grad_() for tensor in tensors]
        numbers: tuple[list[int], ...] = [0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4], []
        places = (torch.tensor(of, dtype=torch.int64, device=device) for of in numbers)
        ours = cascade(*tensors, PrefixedRows(3, 3, *places), None)
        computed = [ours, *torch.autograd.grad(ours.float().square().sum(), tensors)]
        exact = [tensor.detach().float().cpu().requires_grad_() for tensor in tensors]
        query, key, value = _same_heads(*exact)
        plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)
        expected = [plain, *torch.autograd.grad(plain.square().sum(), exact)]
        pairs = [(one.float().cpu(), other) for one, other in zip(computed, expected, strict=True)]
    except torch.OutOfMemoryError:  # not the kernels' fault
        raise
    # another version of torch may lack the kernels or give them other arguments; a device may lack them
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return False
    return all(bool((a - b).norm() <= kernels.tolerance * b.norm()) for a, b in pairs)
