"""The causal-LM loss as a sum, so that one division by the whole step's tokens makes it a mean (law 1)."""

from __future__ import annotations

import torch
from torch.nn import functional

from accel_sft.chat import IGNORED


def nll_sum(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum over the batch's supervised tokens of the negative log-likelihood, in nats, float32, shape ().

    Zero, and still connected to the weights, for a batch without such a token.

    Args:
        batch: `collate`'s tensors, each (B, T).
    """
    output = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    labels = batch["labels"][:, 1:]  # (B, T-1): token t is predicted from t-1
    wanted = labels != IGNORED
    logits = output.logits[:, :-1][wanted].float()  # (tokens, V): only what is supervised is upcast
    if not len(logits):
        return output.logits.float().sum() * 0.0
    return functional.cross_entropy(logits, labels[wanted], reduction="sum")
