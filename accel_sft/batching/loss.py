"""The causal-LM loss as a sum over tokens, and the LM heads; training/step.py divides by the step's tokens."""

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from accel_sft.batching.collate import Batch
from accel_sft.io.heartbeat import heartbeat
from accel_sft.memory.job import MOST_LOGITS
from accel_sft.models.architecture import arguments
from accel_sft.models.prefix_cache import prefix_first, with_forward

Logits = Callable[[torch.Tensor], torch.Tensor]
"""The output embeddings' own forward."""

EXACT = 0.02
"""Maximum difference of a kernel's losses and gradients in bfloat16 from the plain formula's, relative to these."""


def nll(model: torch.nn.Module, batch: Batch, most_logits: int | None = None) -> torch.Tensor:
    """Return each target's negative log-likelihood in nats, float32, (E,); for a batch without targets a zero, (1,),
    that is still connected to the weights.

    Args:
        most_logits: maximum number of logits that the head `pieces` holds at once; by default what the batch says.
    """
    heartbeat()
    return HEADS[batch.head](model, batch, most_logits or batch.most_logits or MOST_LOGITS)


def nll_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Sum over the batch's supervised tokens of their negative log-likelihood, in nats, float32, shape ().

    Zero, and still connected to the weights, for a batch without such a token.
    """
    each = nll(model, batch)
    return (each * batch.weights).sum() if len(batch.targets) else each.sum()


def fused_kernel(device: torch.device) -> Any:
    """Return the kernel of cut-cross-entropy (Wijmans et al., 2025, arXiv 2411.09009). None if it is not installed, the
    device is no GPU, bits must repeat (it adds in no fixed order), or its gradients are wrong on this device."""
    installed = device.type == "cuda" and importlib.util.find_spec("cut_cross_entropy")
    return _exact_kernel(device) if installed and not torch.are_deterministic_algorithms_enabled() else None


@functools.cache
def _exact_kernel(device: torch.device) -> Any:
    from cut_cross_entropy import linear_cross_entropy

    kernel = functools.partial(linear_cross_entropy, filter_eps=None)  # by default it leaves out small gradients
    return kernel if is_exact(kernel, device) else None


def is_exact(kernel: Any, device: torch.device) -> bool:
    """Whether the kernel's losses and gradients in bfloat16 agree with the plain formula's on a few tokens."""
    with torch.enable_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        hidden, weight = (torch.randn(rows, 64, device=device).bfloat16() for rows in (64, 256))
        targets = torch.arange(64, device=device)
        found: list[tuple[torch.Tensor, ...]] = []
        for dtype, nll_of in ((torch.bfloat16, kernel), (torch.float64, _plain)):
            ends = [part.to(dtype, copy=True).requires_grad_() for part in (hidden, weight / 8)]
            losses = nll_of(ends[0], ends[1], targets, reduction="none")
            found.append((losses.detach(), *torch.autograd.grad(losses.sum(), ends)))
    return all((ours - theirs).norm() <= EXACT * theirs.norm() for ours, theirs in zip(*found, strict=True))


def _plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
    return functional.cross_entropy(hidden @ weight.T, targets, reduction=reduction)


def labelled(model: torch.nn.Module, batch: Batch, most_logits: int) -> torch.Tensor:
    """Each target's loss, with logits computed only where something is predicted."""
    return _nll_of_kept(_logits(model, batch, logits_to_keep=batch.keep), batch)


def everywhere(model: torch.nn.Module, batch: Batch, most_logits: int) -> torch.Tensor:
    """Each target's loss, with logits computed at every token: for a forward that takes no `logits_to_keep`."""
    logits = _logits(model, batch)
    return _nll_of_kept(logits[batch.keep] if batch.keep.ndim == 2 else logits[:, batch.keep], batch)


def pieces(model: torch.nn.Module, batch: Batch, most_logits: int) -> torch.Tensor:
    """Each target's loss, with logits in pieces of `most_logits`, which the backward computes again: a large vocabulary
    costs time, not memory."""
    tokens = max(most_logits // _unwrapped(model).config.get_text_config().vocab_size, 1)
    if len(batch.targets) <= tokens:
        return labelled(model, batch, most_logits)

    def in_pieces(head: torch.nn.Module, logits_of: Logits, hidden: torch.Tensor) -> torch.Tensor:
        parts = zip(hidden.split(tokens), batch.targets.split(tokens), strict=True)
        return torch.cat([checkpoint(piece, logits_of, *part, use_reentrant=False) for part in parts])

    def piece(logits_of: Logits, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return _nll(logits_of(hidden), targets)

    return _in_the_head(model, batch, in_pieces)


def fused(model: torch.nn.Module, batch: Batch, most_logits: int) -> torch.Tensor:
    """Each target's loss, from one kernel for head and loss that holds no logits."""
    if not len(batch.targets):
        return labelled(model, batch, most_logits)

    def in_kernel(head: torch.nn.Module, logits_of: Logits, hidden: torch.Tensor) -> torch.Tensor:
        kind = type(head)
        if issubclass(kind, FSDPModule):  # FSDP puts a class of its own above the head's
            kind = kind.__bases__[-1]
        if kind is not torch.nn.Linear or head.bias is not None or head.weight.is_meta:
            raise TypeError("the fused head is for a plain matrix, there at all times")
        device, dtype = hidden.device, hidden.dtype
        if torch.is_autocast_enabled(device.type):  # autocast casts for products, not for this kernel
            dtype = torch.get_autocast_dtype(device.type)
        return fused_kernel(device)(hidden.to(dtype), head.weight.to(dtype), batch.targets, reduction="none")

    return _in_the_head(model, batch, in_kernel)


HEADS = {head.__name__: head for head in (fused, pieces, labelled, everywhere)}
"""Functions that compute a forward's logits and their loss, by the name in a batching's record, in the order in which
they are tried on a model. Each takes the arguments of `nll`, `most_logits` included."""


def available_heads(model: torch.nn.Module, device: torch.device) -> list[str]:
    """The heads that the model's forward and this device can take, best first."""
    if "logits_to_keep" not in arguments(model):
        return ["everywhere"]
    # under tensor parallelism the kernel would take a part of the vocabulary for all of it
    cut = (getattr(_unwrapped(model), "_tp_size", None) or 1) > 1
    return [name for name in HEADS if name != "fused" or (fused_kernel(device) and not cut)]


def _logits(model: torch.nn.Module, batch: Batch, **kept: Any) -> torch.Tensor:
    behind = contextlib.nullcontext() if batch.prefix is None else prefix_first(_unwrapped(model), batch.prefix)
    with behind:
        logits: torch.Tensor = model(**batch.inputs, **kept, use_cache=False).logits
    return logits


def _nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, reduction="none")


def _nll_of_kept(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Each target's loss from the logits of the P positions that predict something, (..., P, V)."""
    logits = logits.flatten(0, -2)
    if not len(batch.targets):
        return logits.float().sum()[None] * 0.0
    return _nll(logits if batch.sources is None else logits[batch.sources], batch.targets)


def _in_the_head(
    model: torch.nn.Module, batch: Batch, nll_of: Callable[[torch.nn.Module, Logits, torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Each target's loss, (E,), from a forward whose head returns `nll_of` the targets' hidden states.

    The loss is computed within the model's own forward, so that whatever gathers weights for the head (ZeRO-3, FSDP)
    still does.
    """
    head = _unwrapped(model).get_output_embeddings()
    logits_of = head.forward

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if not hidden.numel():  # of a prefix no logits are asked for
            return logits_of(hidden)
        hidden = hidden.flatten(0, -2)  # (P, H)
        return nll_of(head, logits_of, hidden if batch.sources is None else hidden[batch.sources])[:, None]

    with with_forward(head, forward):
        return _logits(model, batch, logits_to_keep=batch.keep).flatten().float()


def _unwrapped(model: Any) -> Any:
    """The model below DDP's or DeepSpeed's wrapper."""
    while hasattr(model, "module"):
        model = model.module
    return model
