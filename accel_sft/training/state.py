"""`TrainState`: a run's counters, metrics and best step, saved in checkpoints; and the learning rate. No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 0): a pure function, so that a resumed run goes on with the same rates.

    The rate rises linearly to `--learning-rate`, then follows `--lr-scheduler`: cosine and linear fall from then on;
    wsd (warmup-stable-decay) is constant, then falls linearly over the last `--decay-ratio` of the steps; constant
    never falls. A falling rate reaches `--min-lr-ratio` of the peak right after the last step.
    """
    peak, warmup_steps = config.learning_rate, config.warmup_steps
    assert peak is not None  # resolved
    if warmup_steps is None:
        warmup_steps = math.ceil(config.warmup_ratio * total_steps)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if config.lr_scheduler == "constant":
        return peak
    begin = warmup_steps
    if config.lr_scheduler == "wsd":
        begin = max(begin, total_steps - math.ceil(config.decay_ratio * total_steps))
    progress = max(step - begin, 0) / max(total_steps - begin, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    left = {"cosine": cosine, "linear": 1 - progress, "wsd": 1 - progress}[config.lr_scheduler]
    return peak * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


@dataclasses.dataclass
class TrainState:
    """Counters and metrics after `step` steps."""

    step: int = 0
    seconds: float = 0.0  # time spent in steps, without evaluations and checkpoints
    tokens: int = 0  # tokens trained on: prompts count, padding does not
    before: dict[str, float | None] | None = None  # the first evaluation's metrics
    latest: dict[str, float | None] | None = None  # the newest evaluation's
    evaluated_step: int = -1  # step of the newest evaluation; -1 before there is one
    best: float | None = None  # best main metric so far
    best_loss: float | None = None  # loss of the same evaluation
    best_step: int | None = None  # step of the same evaluation
    without_better: int = 0  # evaluations since the main metric improved

    @classmethod
    def of(cls, saved: Mapping[str, Any], path: Path) -> TrainState:
        """The state saved in a checkpoint; UserError if another version wrote its fields."""
        try:
            return cls(**saved["progress"])
        except (KeyError, TypeError):
            problem = "another version wrote this checkpoint; resume the run with that version"
            raise UserError(f"{path}: {problem}") from None

    def out_of_patience(self, patience: int | None) -> bool:
        """Whether the last `patience` evaluations did not improve the main metric."""
        return patience is not None and self.without_better >= patience

    def stop_reason(self, total_steps: int, patience: int | None) -> str | None:
        """Why patience ended the run before its last step; None if it did not."""
        count = f"{self.without_better} evaluation{'s' * (self.without_better != 1)} without improvement"
        why = f"at step {self.step} of {total_steps}, after {count} on step {self.best_step} (--patience {patience})"
        return why if self.step < total_steps else None

    def update_best(self, value: float, loss: float, higher_is_better: bool) -> bool:
        """Record a main metric; returns whether it is the best so far. At equal values, a lower loss is better.

        NaN is never the best.
        """
        self.without_better += 1
        better = self.best is None or (value > self.best if higher_is_better else value < self.best)
        lower = value == self.best and self.best_loss is not None and loss < self.best_loss
        if math.isnan(value) or not (better or lower):
            return False
        if better:
            self.without_better = 0
        self.best, self.best_loss, self.best_step = value, loss, self.step
        return True
