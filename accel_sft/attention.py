"""Attention of rows that stand in one sequence behind one copy of their common prefix, without a mask of its square."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface


@dataclasses.dataclass(frozen=True)
class Rows:
    """Where the rows of a sequence stand: `prefix` tokens seen by all, then each row's own tokens, one after another.

    Attributes:
        shape: rows R, and tokens L of the longest.
        own: positions of each row's own tokens in the sequence, (R * L,); a shorter row repeats its last one.
        back: where in `own` each token behind the prefix stands, (T - prefix,).
        seen: which of prefix and own tokens a row's token sees, (L, prefix + L); None without a prefix.
    """

    prefix: int
    shape: tuple[int, int]
    own: torch.Tensor
    back: torch.Tensor
    seen: torch.Tensor | None


def install() -> None:
    """Let every model with sdpa attention take `rows` among its arguments; without them nothing changes."""
    AttentionInterface.register("sdpa", rows_attention)


def rows_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    rows: Rows | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa by rows: the prefix sees itself, each row sees the prefix and itself; none sees another.

    Rows are cut out of the sequence into a batch, the prefix's keys and values are put before each, and the answers go
    back to where the queries stood. Short rows are filled up at the end, which causality keeps from being seen.

    Args:
        query: (1, heads, T, D); key and value may have fewer heads.
    Returns:
        (1, T, heads, D), and None for the weights, as all attention functions of transformers do.
    """
    if rows is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, *args, **kwargs)
    kwargs.pop("is_causal", None)
    count, longest = rows.shape
    cut = [_cut(tensor, rows.own, count, longest) for tensor in (query, key, value)]
    if not rows.prefix:
        output, _ = sdpa_attention_forward(module, *cut, None, *args, is_causal=True, **kwargs)
        return output.flatten(0, 1)[rows.back][None], None
    before = [tensor[:, :, : rows.prefix] for tensor in (query, key, value)]
    for at in (1, 2):
        cut[at] = torch.cat([before[at].expand(count, -1, -1, -1), cut[at]], dim=2)
    output, _ = sdpa_attention_forward(module, *cut, rows.seen, *args, is_causal=False, **kwargs)
    first, _ = sdpa_attention_forward(module, *before, None, *args, is_causal=True, **kwargs)
    return torch.cat([first, output.flatten(0, 1)[rows.back][None]], dim=1), None


def _cut(tensor: torch.Tensor, own: torch.Tensor, count: int, longest: int) -> torch.Tensor:
    """(1, heads, T, D) -> (R, heads, L, D)."""
    heads, size = tensor.shape[1], tensor.shape[3]
    return tensor[0].index_select(1, own).view(heads, count, longest, size).transpose(0, 1)
