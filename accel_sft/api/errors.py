"""The error that users see without a traceback, and helpers that describe other errors by place and first line."""

import traceback
from pathlib import Path


class UserError(Exception):
    """An error that the user can fix: one line for each problem, with what is wrong, where, and what to do.

    It is printed without a traceback (unless `--debug`) and ends the process with a non-zero status. Control characters
    are escaped, because a problem may repeat a file's content.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(map(_on_one_line, problems))
        super().__init__("\n".join(self.problems))


def _on_one_line(text: str) -> str:
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in text)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its class name if it has none (a bare `raise NotImplementedError`)."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def what_and_where(error: BaseException) -> str:
    """Describe an error in a plugin's code, with the innermost source line outside this package."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:  # a SyntaxError names its place itself
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"
    package = Path(__file__).parent.parent
    frames = [(Path(frame.filename), frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    others = [(path, line) for path, line in frames if path.suffix == ".py" and "importlib" not in path.parts]
    outside = [f"{path}:{line}" for path, line in others if package not in path.parents]
    where = f" ({outside[-1]})" if outside else ""
    return f"{type(error).__name__}: {error}{where}"
