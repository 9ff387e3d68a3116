"""Attention of rows behind one copy of their common prefix, for training and for generation."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

from accel_sft.models import cascade as kernels
from accel_sft.models.cascade import PrefixedRows, cascade, cut_rows, usable

_made: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Additive masks, by the boolean mask that each was made of."""


def install(device: torch.device | None = None) -> None:
    """Let every model with sdpa attention take `rows` or `decoding` among its arguments; without them nothing changes.

    It changes transformers' attention for the whole process, so call it only where a model is prepared for such
    arguments.

    Args:
        device: where rows will be computed; kernels that copy no prefix are probed there. None probes none.
    """
    if device is not None:
        kernels.probe_kernels(device)
    AttentionInterface.register("sdpa", rows_attention)


def installed() -> bool:
    """Whether sdpa takes `rows` and `decoding`; plain sdpa would ignore them, and rows would see each other."""
    return AttentionInterface()["sdpa"] is rows_attention


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    rows: PrefixedRows | None = None,
    decoding: Callable[..., torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa by rows: the prefix sees itself, each row sees the prefix and itself; rows do not see each other.

    Where the device has no kernels for that, rows are cut out of the sequence into a batch, the prefix's keys and
    values are put before each, and the outputs go back to where the queries stood. Short rows are padded at the end,
    where causality hides the padding.

    Args:
        query: (1, heads, T, D); key and value may have fewer heads.
        decoding: computes attention in place of all this, with keys and values of its own (evaluation/live_rows.py).
    Returns:
        (1, T, heads, D), and None for the weights, as all attention functions of transformers do.
    """
    if decoding is not None:
        return decoding(module, query, key, value, kwargs.get("scaling")), None
    query, key, value = (_as_autocast(tensor) for tensor in (query, key, value))
    if rows is None:
        full_pass = query.shape[2] == key.shape[2] and not torch.compiler.is_compiling()
        if full_pass and attention_mask is not None and attention_mask.dtype == torch.bool:
            attention_mask = _additive(attention_mask, query.dtype)
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    kwargs.pop("is_causal", None)
    others = (kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    plain = not (any(args) or kwargs.get("dropout") or any(others))
    if plain and (fused := usable(query, key, value, rows.prefix)):
        return cascade(query, key, value, rows, kwargs.get("scaling"), fused), None
    sequence = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]
    cut = [cut_rows(tensor[rows.prefix :], rows) for tensor in sequence]
    sdpa: Any = sdpa_attention_forward
    if not rows.prefix:
        output, _ = sdpa(module, *cut, None, *args, is_causal=True, **kwargs)
        return output.flatten(0, 1)[rows.back][None], None
    before = [tensor[:, :, : rows.prefix] for tensor in (query, key, value)]
    for i in (1, 2):  # keys and values
        cut[i] = torch.cat([before[i].expand(len(cut[i]), -1, -1, -1), cut[i]], dim=2)
    # made in each layer, as sdpa turns it into numbers in each; with kernels nobody needs it, at 8k tokens 72 MB
    seen = query.new_ones(rows.longest, rows.prefix + rows.longest, dtype=torch.bool).tril(rows.prefix)
    output, _ = sdpa(module, *cut, seen, *args, is_causal=False, **kwargs)
    first, _ = sdpa(module, *before, None, *args, is_causal=True, **kwargs)
    return torch.cat([first, output.flatten(0, 1)[rows.back][None]], dim=1), None


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Cast a float32 tensor as autocast would in the product: rotated queries and keys come in float32, and would be
    cut, joined and repeated at twice the size. The kernels are none of autocast's operators and would not cast."""
    kind = tensor.device.type
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask as numbers to add, made once per forward; sdpa would make one per layer, kept for the backward.

    Its rows begin at multiples of 8; otherwise GPUs would copy the mask in each layer to align it.
    """
    made = _made.get(mask)
    if made is None or made.dtype != dtype:
        length = mask.shape[-1]
        made = mask.new_zeros((*mask.shape[:-1], -length // 8 * -8), dtype=dtype)[..., :length]
        _made[mask] = made.masked_fill_(~mask, -torch.inf)
    return made
