"""How long a task's tokenized examples are: each training run keeps it in the cache, and `plan` reads it. No torch."""

import contextlib
import dataclasses
import hashlib
import json
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.io import cache

_KIND = "lengths"
_DECIDE = ("model", "init_from", "max_length", "truncation", "thinking", "control_tokens")
"""Settings that decide how long examples are."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens of a task's training examples.

    Attributes:
        longest: of one example.
        longest_supervised: of one example, with a loss.
        mean, mean_supervised: over all examples.
        source: what they were taken from, in words.
    """

    longest: int
    longest_supervised: int
    mean: float
    mean_supervised: float
    source: str


def keep(task: Task, config: TrainConfig, lengths: Any, supervised: Any) -> None:
    """Keep what a run has tokenized, in place of what an earlier one left under the same settings. A cache that cannot
    be written is passed over: nothing depends on it.

    Args:
        lengths, supervised: tokens of each training example, and those with a loss, as arrays.
    """
    about = {
        "longest": int(lengths.max()),
        "longest_supervised": int(supervised.max()),
        "mean": float(lengths.mean()),
        "mean_supervised": float(supervised.mean()),
    }
    key = _key(task, config)
    with contextlib.suppress(OSError):
        found = cache.find(_KIND, key)
        if found and found[1] == about:
            return
        if found:
            cache.discard(_KIND, key)
        with cache.partial(_KIND) as made:
            cache.publish(made, _KIND, key, about)


def read(task: Task, config: TrainConfig) -> Lengths:
    """Lengths of the task's examples under these settings, which must be resolved: as its last run here tokenized
    them, else `--max-length`, of which every token may be supervised."""
    found = cache.find(_KIND, _key(task, config))
    if found:
        return Lengths(**found[1], source="of the data as it was tokenized here last")
    most = config.max_length or 0
    return Lengths(most, most, most, most, source="--max-length, as the data has not been tokenized here")


def _key(task: Task, config: TrainConfig) -> str:
    kind = f"{type(task).__module__}.{type(task).__qualname__}"
    parts = [kind, dataclasses.asdict(task), {name: getattr(config, name) for name in _DECIDE}]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]
