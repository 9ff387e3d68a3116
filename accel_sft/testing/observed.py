"""What the trainer would read of a task: hashes that must be equal at every call and on every rank."""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

from accel_sft.api.task import Task
from accel_sft.data.conversation import conversation, read_split


def read(task: Task, examples: Sequence[Any], split: str, index: int) -> tuple[Any, Any]:
    """An example's messages and target. A target that is a list, of turns to be learnt, is taken as it is.

    Raises:
        UserError: the task fails on it, or gives what is no conversation.
    """
    target = task.target(examples[index])
    if isinstance(target, list):
        return task.messages(examples[index]), target
    return conversation(task, examples, split, index)


def observed(task: Task, split: str, most: int) -> list[str]:
    """Of at most `most` examples, evenly spread, a SHA-256 of messages and target; the number of rows is in each."""
    examples = read_split(task, split)
    step = max(1, math.ceil(len(examples) / most))
    found = []
    for index in range(0, len(examples), step):
        content = [len(examples), task.messages(examples[index]), task.target(examples[index])]
        found.append(hashlib.sha256(json.dumps(content, default=repr).encode()).hexdigest())
    return found
