"""What a person can mend, told without a traceback; and where a stranger's code failed. Standard library only."""

from __future__ import annotations

import traceback
from pathlib import Path


class UserError(Exception):
    """A mistake the person at the terminal can mend: one line each of what, where and what to do.

    It is printed without a traceback (unless `--debug`) and ends the process with a non-zero status.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def what_and_where(error: BaseException) -> str:
    """A stranger's error, and the line of its source that raised it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).suffix == ".py"]
    frames = [
        f
        for f in frames
        if "importlib" not in Path(f.filename).parts and Path(f.filename).parent != Path(__file__).parent
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"
