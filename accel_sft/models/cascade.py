"""A CPU kernel for attention of many rows to one prefix, without a copy of the prefix for each row.

Attention to the prefix and attention within the row are computed apart, each with its log-sum-exp, and added up in
the proportions of their exponential sums ("cascade", as in Ye et al., FlashInfer, 2024). In the backward, given the
log-sum-exp of the whole, each part yields its share of the whole's gradient ("ring", as in Liu et al., 2023, arXiv
2310.01889), so that only the whole's output is kept.
"""

import functools
from typing import Any

import torch
from torch.nn import functional

_TOLERANCE = 1e-4
"""Largest allowed difference from plain attention, as a share of its norm; above it, torch's kernels are not used."""
_known: bool | None = None


def usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether `cascade` takes these tensors, and torch has the kernels that it is made of."""
    return (
        query.device.type == "cpu"
        and query.dtype == key.dtype == value.dtype
        and query.shape[-1] == value.shape[-1]
        and not (torch.is_autocast_enabled("cpu") and query.dtype == torch.float32)  # autocast would cast them
        and bool(_known)
    )


class _Cascade(torch.autograd.Function):
    """Causal attention over a prefix and the rows that follow it: each row sees the prefix and itself, no other row.

    Args:
        query: (1, heads, P + N, D), as are key and value: the prefix, then the N tokens of all rows.
        prefix: number of the prefix's tokens, P, at least one.
        own: for each of the R * L places of rows padded to the longest, L: which of the N tokens stands there.
        back: for each of the N tokens: in which of these places it stands.
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
        prefix: int,
        own: torch.Tensor,
        back: torch.Tensor,
        longest: int,
        scale: float | None,
    ) -> torch.Tensor:
        kernel = functools.partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, scale=scale)
        before, behind = _parts(prefix, query, key, value)
        alone, alone_sum = kernel(*before, is_causal=True)
        first, first_sum = kernel(behind[0], *before[1:])
        second, second_sum = kernel(*(cut_rows(tensor, own, longest) for tensor in behind), is_causal=True)
        first, first_sum = first.transpose(1, 2), first_sum.transpose(1, 2)
        second, second_sum = (_back(tensor, back) for tensor in (second, second_sum))
        whole = torch.logaddexp(first_sum, second_sum)  # (1, N, heads)
        rows = first * (first_sum - whole).exp()[..., None] + second * (second_sum - whole).exp()[..., None]
        output = torch.cat([alone.transpose(1, 2), rows.to(query.dtype)], dim=1)
        sums = torch.cat([alone_sum.transpose(1, 2), whole], dim=1)
        ctx.save_for_backward(query, key, value, own, back, output, sums)
        ctx.prefix, ctx.longest, ctx.scale = prefix, longest, scale
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, own, back, *rest = ctx.saved_tensors
        kernel = functools.partial(
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0, scale=ctx.scale
        )
        # what the kernel takes, in its order: gradient, query, key, value, output, sums, each (1, heads, T, ...)
        output, sums = (tensor.transpose(1, 2) for tensor in rest)
        before, behind = _parts(ctx.prefix, gradients[0].transpose(1, 2), query, key, value, output, sums)
        alone = kernel(*before, is_causal=True)
        first = kernel(*behind[:2], *before[2:4], *behind[4:], is_causal=False)
        cut = [cut_rows(tensor, own, ctx.longest) for tensor in behind[1:]]
        # the output at padding gets a gradient of zero, so padding contributes nothing
        filled = behind[0].new_zeros(len(own), query.shape[1], query.shape[3])
        filled[back] = behind[0][0].transpose(0, 1)
        second = kernel(filled.unflatten(0, (-1, ctx.longest)).transpose(1, 2), *cut, is_causal=True)
        queries, keys, values = (_back(gradient, back).transpose(1, 2) for gradient in second)
        return (
            torch.cat([alone[0], first[0] + queries], dim=2),
            torch.cat([alone[1] + first[1], keys], dim=2),
            torch.cat([alone[2] + first[2], values], dim=2),
            *(None,) * 5,
        )


cascade = _Cascade.apply


def _parts(prefix: int, *tensors: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors of shape (1, heads, T, ...) split into the prefix's tokens and the rows'."""
    return [tensor[:, :, :prefix] for tensor in tensors], [tensor[:, :, prefix:] for tensor in tensors]


def cut_rows(tensor: torch.Tensor, own: torch.Tensor, longest: int) -> torch.Tensor:
    """Cut out rows, and pad them to the longest, L: (1, heads, N, ...) -> (R, heads, L, ...); `own` as in `cascade`."""
    return tensor[0].transpose(0, 1).index_select(0, own).unflatten(0, (-1, longest)).transpose(1, 2)


def _back(rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    """(R, heads, L, ...) -> (1, N, heads, ...)."""
    return rows.transpose(1, 2).flatten(0, 1).index_select(0, back)[None]


def probe_kernels() -> None:
    """Find out, once, whether torch has the kernels, and whether they compute a small example and its gradients right.

    Call it outside any forward, where no compiler, autograd mode or default device of the model is in effect.
    """
    global _known
    if _known is None:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            _known = _kernels_are_known()


def _kernels_are_known() -> bool:
    drawn = torch.Generator("cpu").manual_seed(0)
    tensors = [
        torch.randn(1, 2, 8, 8, generator=drawn, dtype=torch.float32, device="cpu", requires_grad=True)
        for _ in range(3)
    ]
    row = torch.tensor([-1, -1, -1, 0, 0, 0, 1, 1], device="cpu")  # a prefix of three, rows of three and of two
    seen = ((row[None] == -1) | (row[:, None] == row[None])).tril()
    own, back = torch.tensor([0, 1, 2, 3, 4, 4], device="cpu"), torch.tensor([0, 1, 2, 3, 4], device="cpu")
    query, key, value = tensors
    try:
        plain = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)
        expected = [plain, *torch.autograd.grad(plain.square().sum(), tensors)]
        ours = cascade(*tensors, 3, own, back, 3, None)
        found = [ours, *torch.autograd.grad(ours.square().sum(), tensors)]
    # another torch may lack the kernels or give them other arguments; the prefix is then copied, which is as exact
    except (AttributeError, RuntimeError, TypeError, ValueError, IndexError, AssertionError):
        return False
    return all(bool((a - b).norm() <= _TOLERANCE * b.norm()) for a, b in zip(found, expected, strict=True))
