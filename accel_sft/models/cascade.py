"""Attention of many rows to one prefix, without a copy of the prefix for each row.

Attention within the prefix and within each row, and the rows' attention to the prefix, are computed apart, each with
its log-sum-exp, and added up in the proportions of their exponential sums ("cascade", as in Ye et al., FlashInfer,
2024). In the backward, given the log-sum-exp of the whole, each part yields its share of the whole's gradient ("ring",
as in Liu et al., 2023, arXiv 2310.01889), so that only the whole's output is kept. row_kernels.py has the parts.
"""

from typing import Any

import torch
from torch.nn import functional

from accel_sft.models.row_kernels import KERNELS, PADDED, Kernels, PrefixedRows

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
            whole = torch.logaddexp(before_sums, own_sums)  # (N, heads)
            shares = ((each - whole).exp()[..., None] for each in (before_sums, own_sums))
            own.copy_(before * next(shares) + own * next(shares))
            own_sums.copy_(whole)
        ctx.save_for_backward(query, key, value, output, sums)
        ctx.rows, ctx.scale, ctx.kernels = rows, scale, kernels
        return output[None]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums = ctx.saved_tensors
        rows, scale, prefix = ctx.rows, ctx.scale, ctx.rows.prefix
        key_heads = key.shape[1]
        alike = ctx.kernels.alike(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
        kept = gradients[0][0], *alike, output, sums
        found = ctx.kernels.within_backward(rows, scale, *kept)
        if prefix:
            cut = ((slice(prefix) if each in (2, 3) else slice(prefix, None)) for each in range(len(kept)))
            before = (tensor[where] for tensor, where in zip(kept, cut, strict=True))
            of_queries, *of_prefix = ctx.kernels.across_backward(rows, scale, *before)
            found[0][prefix:] += of_queries
            for gradient, share in zip(found[1:], of_prefix, strict=True):
                gradient[:prefix] += share
        found = ctx.kernels.grouped(key_heads, found)
        return (*(gradient.transpose(0, 1)[None] for gradient in found), None, None, None)


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
    index = [torch.tensor(each, device="cpu") for each in ([0, 1, 2, 3, 4, 4], [0, 1, 2, 3, 4])]
    bounds = [torch.tensor(each, device="cpu", dtype=torch.int32) for each in ([0, 3, 6, 8], [0, 5])]
    try:
        tensors = [torch.randn(shape, generator=drawn, dtype=torch.float32, device="cpu") for shape in shapes]
        tensors = [tensor.to(device, kernels.dtype).requires_grad_() for tensor in tensors]
        own, back, segments, behind = (tensor.to(device) for tensor in (*index, *bounds))
        rows = PrefixedRows(3, 3, own, back, segments, behind)
        ours = cascade(*tensors, rows, None, kernels)
        found = [ours, *torch.autograd.grad(ours.float().square().sum(), tensors)]
        exact = [tensor.detach().float().cpu().requires_grad_() for tensor in tensors]
        query, key, value = exact[0], *(tensor.repeat_interleave(2, dim=1) for tensor in exact[1:])
        plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)
        expected = [plain, *torch.autograd.grad(plain.square().sum(), exact)]
        pairs = [(one.float().cpu(), other) for one, other in zip(found, expected, strict=True)]
    except torch.OutOfMemoryError:  # which says nothing about the kernels
        raise
    # another torch may lack the kernels or give them other arguments, a device may lack them; the prefix is then
    # copied, which is as exact
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return False
    return all(bool((a - b).norm() <= kernels.tolerance * b.norm()) for a, b in pairs)
