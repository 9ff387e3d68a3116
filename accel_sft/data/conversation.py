"""An example as the task gives it, messages and target, and the checks that they are what they must be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task
from accel_sft.io.text import LONGEST_ERROR, one_line


def conversation(task: Task, examples: Sequence[Any], split: str, index: int) -> tuple[list[dict[str, str]], str]:
    """An example's messages and target, checked.

    Raises:
        UserError: the task fails on it or returns something else, by split and index.
    """
    try:
        example = examples[index]
        turns, target = task.messages(example), task.target(example)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{split} example {index}: the task failed: {one_line(what_and_where(error), LONGEST_ERROR)}"
        ) from error
    if not isinstance(target, str):
        raise UserError(f"{split} example {index}: target() gave {type(target).__name__}, expected text")
    valid = isinstance(turns, list) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    )
    if not valid or not turns:
        raise UserError(
            f"{split} example {index}: messages() gave {str(turns)[:80]!r}, "
            'expected a list of {"role": ..., "content": ...}'
        )
    if turns[-1]["role"] == "assistant":
        raise UserError(
            f"{split} example {index}: messages() ends with an assistant turn; the answer belongs in target()"
        )
    if any(not text.isprintable() and re.search("[\ud800-\udfff]", text) for text in (target, *contents(turns))):
        raise UserError(f"{split} example {index}: a lone surrogate (\\ud800-\\udfff) is not text; remove it")
    return turns, target


def contents(turns: list[dict[str, str]]) -> list[str]:
    """The text of each message."""
    return [turn["content"] for turn in turns]
