"""What the trainer would read of a task: hashes that must be equal at every call and on every rank."""

import hashlib
import json
import math

from accel_sft.api.task import Task
from accel_sft.data.conversation import read_split


def observed(task: Task, split: str, most: int) -> list[str]:
    """Of at most `most` examples, evenly spread, a SHA-256 of messages and target; the number of rows is in each."""
    examples = read_split(task, split)
    step = max(1, math.ceil(len(examples) / most))
    found = []
    for index in range(0, len(examples), step):
        content = [len(examples), task.messages(examples[index]), task.target(examples[index])]
        found.append(hashlib.sha256(json.dumps(content, default=repr).encode()).hexdigest())
    return found
