"""The learning rate of every step: a pure function, so that a resumed run goes on with the same rates. No torch."""

import math

from accel_sft.api.config import TrainConfig


def learning_rate(step: int, total_steps: int, config: TrainConfig) -> float:
    """The rate of step `step` (from 0).

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
