"""Puts Liger's kernels into a prepared model, and checks that its loss and gradients stay the same."""

import dataclasses

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import UNLIMITED, enough
from accel_sft.launch.collectives import first_reason
from accel_sft.models.kernels import put_kernels_in

_TOLERANCES = {True: (1e-3, 1e-2), False: (0.05, 0.25)}
"""Largest allowed differences in float32 (True) and in reduced precision (False): of the loss in nats per token, and of
a gradient as a share of its norm."""
_SMALL = 1e-12
"""Smallest norm that a gradient's difference is divided by; the norm may be zero."""


def use_liger_kernels(trial: Trial) -> str:
    """Have Liger's kernels compute the prepared model's layers, and return the line that says so.

    The loss of a few rows is compared with and without the kernels. If a forward needs no other rank, so are the
    gradients of the embedded tokens and of trained vectors, such as a norm's weights.

    Raises:
        UserError: the loss or a gradient differs from before; or liger-kernel cannot be used, see `put_kernels_in`.
    """
    accelerator = trial.accelerator
    model = accelerator.unwrap_model(trial.model)
    # where a forward needs other ranks, gradients would be reduced as soon as they are computed
    trial = dataclasses.replace(trial, train=forwards_alone(accelerator))
    plain, rows = Batching("padded", UNLIMITED, head=available_heads(model)[0]), enough(trial.examples)
    vectors = [each for each in model.parameters() if trial.train and each.requires_grad and each.ndim == 1]
    loss, gradients = trial.run(plain, rows, vectors)
    layers = put_kernels_in(model)
    loss_after, gradients_after = trial.run(plain, rows, vectors)

    off = abs(loss - loss_after) / trial.batch(plain, rows).weights.sum().item()
    line = f"Liger's kernels compute {layers} layers: the loss of {len(rows)} rows is off by {off:.1g} nats a token"
    tolerance, most = _TOLERANCES[trial.in_float32]
    exact = off <= tolerance
    if gradients:
        pairs = zip(gradients, gradients_after, strict=True)
        shares = [(before - after).norm() / before.norm().clamp(min=_SMALL) for before, after in pairs]
        share = torch.stack(shares).max().item()  # NaN, if one of them is
        line += f", gradients by {share:.1g} of their norm"
        exact = exact and share <= most
    if wrong := first_reason(None if exact else line):
        raise UserError(f"--use-liger-kernel: {wrong}; leave it out")
    return line
