"""Keeps the lengths of a task's tokenized examples in the cache: runs write them, `plan` reads them. Without torch."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.io import cache

_KIND = "lengths"
_DECIDE: tuple[str, ...] = ("model", "init_from", "max_length", "truncation", "thinking", "control_tokens")
_DECIDE += ("train_limit", "mix", "chat_template", "loss")
"""Settings that affect how long examples are."""
_TOKENIZED = "of the data as it was tokenized here last"


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Tokens and supervised tokens of a task's training examples: maxima and means per example.

    Attributes:
        source: where the numbers come from, in words.
        vocabulary: embedding rows of the built-in model `tiny`, whose tokenizer is made from the data; 0 if unknown.
        pixels: most pixel values of one row's images, as the processor makes them; None if unknown.
    """

    longest: int
    longest_supervised: int
    mean: float
    mean_supervised: float
    source: str
    vocabulary: int = 0
    pixels: int | None = None


def keep(
    task: Task,
    config: TrainConfig,
    lengths: Any,
    supervised: Any,
    mean: Callable[[Any], float],
    vocabulary: int = 0,
    pixels: int = 0,
) -> None:
    """Store the lengths of a run's examples, and replace those of an earlier run with the same settings. A failure is
    ignored. `mean` averages an array (`lengths` or `supervised`) over rows as training draws them."""
    means = mean(lengths), mean(supervised)
    made = Lengths(int(lengths.max()), int(supervised.max()), *means, _TOKENIZED, vocabulary, pixels)
    about, key = dataclasses.asdict(made), _key(task, config)
    with contextlib.suppress(OSError):
        entry = cache.find(_KIND, key)
        if entry and entry[1] != about:
            cache.discard(_KIND, key)
        with cache.partial(_KIND) as folder:
            cache.publish(folder, _KIND, key, about)


def read(task: Task, config: TrainConfig) -> Lengths:
    """The lengths that the last run here stored for these resolved settings; without any, `--max-length` for all."""
    entry = cache.find(_KIND, _key(task, config))
    if entry:
        return Lengths(**entry[1])
    most = (config.max_length or 0) * (1 if config.loss == "sft" else 2)  # a pair has two answers
    return Lengths(most, most, most, most, source="--max-length, because the data has not been tokenized here")


def _key(task: Task, config: TrainConfig) -> str:
    kind = f"{type(task).__module__}.{type(task).__qualname__}"
    form = [field.name for field in dataclasses.fields(Lengths)]  # another version may have other fields
    parts = [kind, dataclasses.asdict(task), {name: getattr(config, name) for name in _DECIDE}, form]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()[:32]
