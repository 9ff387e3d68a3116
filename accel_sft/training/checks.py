"""Checks that Liger's kernels do not change a prepared model's results, and that every trained weight has gradients."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import available_heads
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import UNLIMITED, enough
from accel_sft.checkpoint.partition import SCALES, flat, partitions
from accel_sft.launch.collectives import first_reason, gather_numbers
from accel_sft.launch.info import Launch
from accel_sft.models.architecture import alike
from accel_sft.models.kernels import put_kernels_in

_UPDATES = 3
"""Number of updates after which missing gradients are reported. LoRA's A has no gradient in the first update, since B
starts at zero. If warm-up starts at rate 0, A has none in the second update either."""
_EXPERT = re.compile(r"(?<=\bexperts\.)\d+(?=\.)")
_TOLERANCES = {True: (1e-3, 1e-2), False: (0.05, 0.25)}
"""Largest allowed differences in float32 (True) and in reduced precision (False): of the loss in nats per token, and of
a gradient as a share of its norm."""
_SMALL = 1e-12
"""Smallest divisor of a gradient's difference, used if the gradient's norm is smaller (it may be zero)."""


def use_liger_kernels(trial: Trial) -> str:
    """Have Liger's kernels compute the prepared model's layers, and return a line for the log.

    The loss of a few rows is compared with and without the kernels. If a forward needs no other rank, the gradients of
    the embedded tokens and of trained vectors (such as norm weights) are compared too.
    """
    accelerator = trial.accelerator
    model = accelerator.unwrap_model(trial.model)
    # where a forward needs other ranks, gradients would be reduced as soon as they are computed
    trial = dataclasses.replace(trial, train=forwards_alone(accelerator))
    plain, rows = Batching("padded", UNLIMITED, head=available_heads(model)[0]), enough(trial.examples)
    vectors = [weight for weight in model.parameters() if trial.train and weight.requires_grad and weight.ndim == 1]
    loss, gradients = trial.run(plain, rows, vectors)
    layers = put_kernels_in(model)
    loss_after, gradients_after = trial.run(plain, rows, vectors)

    off = abs(loss - loss_after) / len(trial.batch(plain, rows).targets)
    line = f"Liger's kernels compute {layers} layers: the loss of {len(rows)} rows is off by {off:.1g} nats a token"
    tolerance, most = _TOLERANCES[trial.in_float32]
    exact = off <= tolerance
    if gradients:
        pairs = zip(gradients, gradients_after, strict=True)
        shares = [(before - after).norm() / before.norm().clamp(min=_SMALL) for before, after in pairs]
        share = torch.stack(shares).max().item()  # NaN if one of the shares is NaN
        line += f", gradients by {share:.1g} of their norm"
        exact = exact and share <= most
    if wrong := first_reason(None if exact else line):
        raise UserError(f"--use-liger-kernel: {wrong}; leave it out")
    return line


def rounds_updates(accelerator: Accelerator, launch: Launch, model: Any) -> bool:
    """Whether trained weights have 16 bits and no float32 copies. DeepSpeed has copies under ZeRO, bf16 and fp16."""
    copies = launch.backend == "deepspeed" and (launch.stage > 0 or accelerator.mixed_precision != "no")
    return not copies and any(weights.requires_grad and weights.itemsize == 2 for weights in model.parameters())


class Untrained:
    """Looks once for trained weights without a gradient: a weight whose optimizer state is zero has had none.

    Attributes:
        names: the weights without a gradient, similar names merged; None before the check.
    """

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, log: Callable[[str], None]) -> None:
        self._accelerator, self._model, self._optimizer, self._log = accelerator, model, optimizer, log
        self._updates = 0
        self.names: list[str] | None = None

    def look(self, grad_norm: float, *, last: bool) -> None:
        """Call this on every rank after each step, with the step's gradient norm. It checks once, after `_UPDATES`
        updates or at the last step, and logs the weights without a gradient."""
        self._updates += math.isfinite(grad_norm)  # steps with a non-finite norm changed nothing
        if self.names is not None or self._updates < (2 if last else _UPDATES):
            return
        unwrapped = self._accelerator.unwrap_model(self._model)
        trained = [name for name, parameter in unwrapped.named_parameters() if parameter.requires_grad]
        reached = set(self._reached())
        by_rank = gather_numbers([name in reached for name in trained])
        untouched = [name for name, *ranks in zip(trained, *by_rank, strict=True) if not any(ranks)]
        untrained = without_experts(untouched, {*trained} - {*untouched})
        self.names = alike(untrained)
        if untrained:
            adapter = hasattr(unwrapped, "peft_config")
            fix = "name other layers in --lora-target-modules" if adapter else "leave them out with --train-only"
            self._log(
                f"warning: weights without a gradient: {len(untrained)} of {len(trained)} trained weights after "
                f"{self._updates} steps ({', '.join(self.names)}); {fix}"
            )

    def _reached(self) -> Iterator[str]:
        """Yield the names of the weights with a gradient so far in this rank's part: AdamW's second moment is not zero.
        An 8-bit state is judged by its scales, because it does not store zero as 0."""
        for partition in partitions(self._accelerator, self._model, self._optimizer):
            values = partition.state.get(SCALES[-1], partition.state.get(partition.kinds[-1]))
            if values is not None:
                local = flat(values)
                yield from (s.name for s in partition.spans if local[s.offset : s.offset + s.size].any())


def without_experts(untouched: Iterable[str], reached: Iterable[str]) -> list[str]:
    """The `untouched` weights, except experts that no token has chosen yet: those of a layer in which another expert
    has a gradient."""
    chosen = {_EXPERT.sub("*", name) for name in reached if _EXPERT.search(name)}
    return [name for name in untouched if _EXPERT.sub("*", name) not in chosen]
