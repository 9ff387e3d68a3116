"""The causal-LM loss as a sum, so that one division by the whole step's tokens makes it a mean (law 1)."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_sft.batching.collate import Batch
from accel_sft.io.heartbeat import heartbeat

MOST_LOGITS = 2**25
"""Logits (tokens times vocabulary) held at once: 128 MiB in float32, and about three times that in a backward."""


def nll(model: torch.nn.Module, batch: Batch, most_logits: int | None = None) -> torch.Tensor:
    """Negative log-likelihood of each of the batch's targets, in nats, float32, shape (E,).

    The head is computed where something is predicted and nowhere else, if the model's forward can do so; above
    `most_logits` (by default MOST_LOGITS) in pieces that are computed again in the backward, or in one kernel with the
    loss, so that a large vocabulary costs time, not memory.
    """
    heartbeat()
    tokens = _tokens_in_a_piece(model, most_logits or MOST_LOGITS)
    if len(batch.targets) and (batch.head == "fused" or (batch.head == "pieces" and tokens < len(batch.targets))):
        with _head_gives_nll(_unwrapped(model).get_output_embeddings(), batch, tokens):
            return model(**batch.inputs, use_cache=False).logits.flatten().float()
    logits = model(**batch.inputs, use_cache=False).logits
    if batch.head == "everywhere":
        logits = logits[batch.keep] if batch.keep.ndim == 2 else logits[:, batch.keep]
    logits = logits.flatten(0, -2)  # (P, V)
    if not len(batch.targets):
        return logits.float().sum()[None] * 0.0
    return _nll(logits if batch.sources is None else logits[batch.sources], batch.targets)


def nll_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum over the batch's supervised tokens of their negative log-likelihood, in nats, float32, shape ().

    Zero, and still connected to the weights, for a batch without such a token.
    """
    each = nll(model, batch)
    return (each * batch.weights).sum() if len(batch.targets) else each.sum()


def fused_kernel(device: torch.device) -> Any:
    """cut-cross-entropy (Wijmans et al., 2025, arXiv 2411.09009) where it is installed and the device is a GPU."""
    if device.type != "cuda" or importlib.util.find_spec("cut_cross_entropy") is None:
        return None
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


@contextlib.contextmanager
def _head_gives_nll(head: torch.nn.Module, batch: Batch, tokens: int) -> Iterator[None]:
    """Inside, the head answers with each target's loss, (E, 1), where its logits would stand.

    `tokens` at a time, or all at once by the fused kernel. Done within the model's own forward, so that whatever
    gathers weights for the head (ZeRO-3, FSDP) still does.
    """
    logits_of, own = head.forward, head.__dict__.get("forward")

    def piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _nll(logits_of(hidden), targets)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden.flatten(0, -2)  # (P, H)
        hidden = hidden if batch.sources is None else hidden[batch.sources]
        if batch.head == "fused":
            if type(head) is not torch.nn.Linear or head.bias is not None:
                raise TypeError("the fused head is for a plain matrix")
            weight = head.weight.to(hidden.dtype)  # as autocast does
            return fused_kernel(hidden.device)(hidden, weight, batch.targets, reduction="none")[:, None]
        parts = zip(hidden.split(tokens), batch.targets.split(tokens), strict=True)
        return torch.cat([checkpoint(piece, *part, use_reentrant=False) for part in parts])[:, None]

    head.forward = forward
    try:
        yield
    finally:
        if own is None:
            del head.forward
        else:
            head.forward = own


def _tokens_in_a_piece(model: torch.nn.Module, most_logits: int) -> int:
    return max(most_logits // _unwrapped(model).config.get_text_config().vocab_size, 1)


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model below DDP's or DeepSpeed's wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model
