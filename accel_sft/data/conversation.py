"""What a task gives, checked: the examples of a split, and the messages and target of an example."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task
from accel_sft.io.text import LONGEST_ERROR, one_line

Given = TypeVar("Given")
Turns = list[dict[str, str]]
"""A chat: each turn's `role` and `content`."""


def from_task(failed: str, call: Callable[[], Given]) -> Given:
    """What the task's own code gives.

    Raises:
        UserError: `call` raised one, or anything else; then it begins with `failed` and names the task's line.
    """
    try:
        return call()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failed}: {one_line(what_and_where(error), LONGEST_ERROR)}") from error


def read_split(task: Task, split: str) -> Sequence[Any]:
    """The task's examples of a split.

    Raises:
        UserError: the task fails, gives something else, or none at all.
    """
    what = f"the task's dataset({split!r})"
    examples = from_task(f"{what} failed", lambda: task.dataset(split))
    indexed = hasattr(examples, "__len__") and hasattr(examples, "__getitem__")
    if not indexed or isinstance(examples, (Mapping, str, bytes)):
        raise UserError(f"{what} gave {type(examples).__name__}, expected a sequence of examples")
    if not len(examples):
        raise UserError(f"{what} is empty; one example is the least")
    return examples


def conversation(task: Task, examples: Sequence[Any], split: str, index: int) -> tuple[Turns, str]:
    """An example's messages and target.

    Raises:
        UserError: the task fails on it or returns something else, by split and index.
    """
    where = f"{split} example {index}"

    def given() -> tuple[Any, Any]:
        example = examples[index]
        return task.messages(example), task.target(example)

    turns, target = from_task(f"{where}: the task failed", given)
    if not isinstance(target, str):
        raise UserError(f"{where}: target() gave {type(target).__name__}, expected text")
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    )
    if not valid or not turns:
        expected = 'a list of {"role": ..., "content": ...}'
        raise UserError(f"{where}: messages() gave {str(turns)[:80]!r}, expected {expected}")
    if turns[-1]["role"] == "assistant":
        raise UserError(f"{where}: messages() ends with an assistant turn; the answer belongs in target()")
    texts = (target, *(turn["content"] for turn in turns))
    if any(not text.isprintable() and re.search("[\ud800-\udfff]", text) for text in texts):
        raise UserError(f"{where}: a lone surrogate (\\ud800-\\udfff) is not text; remove it")
    return turns, target
