"""Reads a split of a task's examples and checks that it can be used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task
from accel_sft.io.text import LONGEST_ERROR, one_line


def read_split(task: Task, split: str) -> Sequence[Any]:
    """The task's examples of a split.

    Raises:
        UserError: the task fails, gives something else, or none at all.
    """
    try:
        examples = task.dataset(split)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"the task's dataset({split!r}) failed: {one_line(what_and_where(error), LONGEST_ERROR)}"
        ) from error
    indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not indexed or isinstance(examples, (Mapping, str, bytes)):
        raise UserError(
            f"the task's dataset({split!r}) gave {type(examples).__name__}, expected a sequence of examples"
        )
    if not len(examples):
        raise UserError(f"the task's dataset({split!r}) is empty; one example is the least")
    return examples
