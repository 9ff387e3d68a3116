"""Hashes what the trainer would read of a task; the hashes must be equal at every call and on every rank."""

import hashlib
import json
import math
from typing import Any

from accel_sft.api.task import Task
from accel_sft.chat.conversation import read_split
from accel_sft.chat.pictures import Picture


def observed(task: Task, split: str, most: int) -> list[str]:
    """Return a SHA-256 for each of at most `most` examples, evenly spread: of the split's size, messages and target."""
    examples = read_split(task, split)
    step = max(1, math.ceil(len(examples) / most))
    hashes = []
    for index in range(0, len(examples), step):
        content = [len(examples), task.messages(examples[index]), task.target(examples[index])]
        hashes.append(hashlib.sha256(json.dumps(content, default=_known_by).encode()).hexdigest())
    return hashes


def _known_by(value: Any) -> str:
    """A value's text for the hash; for an image its pixels, because its own text differs from call to call."""
    return repr(Picture(value) if hasattr(value, "tobytes") and hasattr(value, "mode") else value)
