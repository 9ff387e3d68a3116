"""The causal-LM loss as a sum, so that one division by the whole step's tokens makes it a mean (law 1)."""

from __future__ import annotations

import torch
from torch.nn import functional

from accel_sft.batching import Batch


def nll(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Negative log-likelihood of each of the batch's targets, in nats, float32, shape (E,).

    The head is computed where something is predicted and nowhere else, if the model's forward can do so.
    """
    logits = model(**batch.inputs, use_cache=False).logits
    if "logits_to_keep" not in batch.inputs:
        logits = logits[batch.keep] if batch.keep.ndim == 2 else logits[:, batch.keep]
    logits = logits.flatten(0, -2)  # (P, V)
    if not len(batch.targets):
        return logits.float().sum()[None] * 0.0
    if batch.sources is not None:
        logits = logits[batch.sources]
    return functional.cross_entropy(logits.float(), batch.targets, reduction="none")


def nll_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum over the batch's supervised tokens of their negative log-likelihood, in nats, float32, shape ().

    Zero, and still connected to the weights, for a batch without such a token.
    """
    each = nll(model, batch)
    return (each * batch.weights).sum() if len(batch.targets) else each.sum()
