"""Computes logits and the causal-LM loss, summed over tokens; training/step.py divides it by the step's tokens."""

import contextlib
from typing import Any

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_sft.batching.collate import Batch
from accel_sft.io.heartbeat import heartbeat
from accel_sft.memory.job import MOST_LOGITS
from accel_sft.models.architecture import arguments
from accel_sft.models.prefix_attention import prefix_first, with_forward


def nll(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Each target's negative log-likelihood in nats, float32, (E,); without targets, a zero (1,) that is still
    connected to the weights."""
    heartbeat()
    return HEADS[batch.head](model, batch)


def nll_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum over the batch's targets of their negative log-likelihood, in nats, float32, shape ()."""
    return nll(model, batch).sum()


def labelled(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Each target's loss, with logits computed only at positions that predict a target."""
    return _nll_of_kept(_logits(model, batch, logits_to_keep=batch.keep), batch)


def everywhere(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Each target's loss, with logits computed at every token, for models without `logits_to_keep`."""
    logits = _logits(model, batch)
    return _nll_of_kept(logits[batch.keep] if batch.keep.ndim == 2 else logits[:, batch.keep], batch)


def pieces(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Each target's loss, in pieces of `most_logits` logits that the backward recomputes. The pieces are computed
    inside the model's own forward, where ZeRO-3 and FSDP gather the head's weights."""
    most_logits = batch.most_logits or MOST_LOGITS
    tokens = max(most_logits // _unwrapped(model).config.get_text_config().vocab_size, 1)
    if len(batch.targets) <= tokens:
        return labelled(model, batch)
    head = _unwrapped(model).get_output_embeddings()
    logits_of = head.forward

    def piece(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _nll(logits_of(hidden), targets)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.numel():  # a prefix needs no logits
            return logits_of(hidden)
        parts = zip(hidden.flatten(0, -2).split(tokens), batch.targets.split(tokens), strict=True)
        return torch.cat([checkpoint(piece, *part, use_reentrant=False) for part in parts])[:, None]

    with with_forward(head, forward):
        return _logits(model, batch, logits_to_keep=batch.keep).flatten().float()


HEADS = {head.__name__: head for head in (pieces, labelled, everywhere)}
"""Functions that compute logits and loss, in the order in which they are tried; a batching's record has their names."""


def available_heads(model: torch.nn.Module) -> list[str]:
    """The heads that the model's forward can take, best first."""
    return list(HEADS) if "logits_to_keep" in arguments(model) else ["everywhere"]


def _logits(model: torch.nn.Module, batch: Batch, **keep: Any) -> torch.Tensor:
    behind = contextlib.nullcontext() if batch.prefix is None else prefix_first(_unwrapped(model), batch.prefix)
    with behind:
        logits: torch.Tensor = model(**batch.inputs, **keep, use_cache=False).logits
    return logits


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def _nll_of_kept(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Each target's loss from the logits that predict it, (..., E, V)."""
    if not len(batch.targets):
        return logits.float().sum()[None] * 0.0
    return _nll(logits.flatten(0, -2), batch.targets)


def _unwrapped(model: Any) -> Any:
    """The model below DDP's or DeepSpeed's wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model
