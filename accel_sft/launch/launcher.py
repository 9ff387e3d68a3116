"""Finds the launcher above this process (`accelerate launch`, or torchrun alone), and reads its command. No torch."""

import contextlib
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

PARENT = os.getppid()
"""Process id of the parent, read before torch is imported. If the launcher were killed during the import, which takes
seconds, a later read would give another process's id."""
_ACCELERATE = re.compile(r"accelerate([-_.]|$)")
_TORCHRUN = re.compile(r"(torchrun|torch\.distributed\.run)$")
PRECISION = "ACCELERATE_MIXED_PRECISION"
"""The variable with which `accelerate launch` always tells ranks a precision; `no` if the user named none."""


def launcher_command() -> tuple[list[str], Path]:
    """Command line and working directory of the `accelerate launch` that started this process; empty without one."""
    if "LOCAL_RANK" in os.environ or PRECISION in os.environ:
        return _command(_above(_ACCELERATE))
    return [], Path()


def torchrun_command() -> list[str]:
    """Command line of the torchrun that started this process; empty without torchrun, and under `accelerate launch`."""
    started = "TORCHELASTIC_RUN_ID" in os.environ and not launcher_command()[0]
    return _command(_above(_TORCHRUN))[0] if started else []


def under_launcher() -> bool:
    """Whether torchrun started this process, or an `accelerate launch` that still runs."""
    return "TORCHELASTIC_RUN_ID" in os.environ or bool(launcher_command()[0])


def restarts() -> int:
    """How often the launcher has started the ranks again after a failure (`--max_restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def will_restart() -> bool:
    """Whether the launcher starts the ranks again if one fails now."""
    return under_launcher() and restarts() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def launcher_flags(command: list[str]) -> dict[str, str]:
    """The launcher's `--name value` flags, by name without dashes. A script's flags, with other names, are included."""
    flags: dict[str, str] = {}
    for index, word in enumerate(command):
        if (word == "-m" and index > 2) or word == "--module":
            break
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            if not value and index + 1 < len(command):
                value = command[index + 1]
            flags.setdefault(name.replace("-", "_"), value)
    return flags


def own_words(command: list[str], without: Collection[str] = ()) -> list[str]:
    """Return the launcher's flags as they were typed, up to the module that it starts; [] if it starts a script. The
    flags in `without` (names without dashes) are left out, with their values."""
    begin = next((at + 1 for at, word in enumerate(command[:3]) if _is_launcher(word)), len(command))
    begin += command[begin : begin + 1] == ["launch"]
    end = next((at for at in range(begin, len(command)) if command[at] in ("-m", "--module")), begin)
    flags: list[str] = []
    skip = False
    for word in command[begin:end]:
        name, equals, _ = word.partition("=")
        left_out = word.startswith("--") and name[2:].replace("-", "_") in without
        if not skip and not left_out:
            flags.append(word)
        skip = left_out and not equals
    return flags


def _is_launcher(word: str) -> bool:
    """Whether a word of a command line is a launcher's program or module."""
    return any(program.search(Path(word).name) for program in (_ACCELERATE, _TORCHRUN))


def _above(program: re.Pattern[str]) -> Any:
    """The nearest ancestor process (a `psutil.Process`) whose command matches `program`; None if no command does."""
    import psutil

    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):
            if any(program.search(Path(word).name) for word in process.cmdline()[:3]):
                return process
    return None


def _command(process: Any) -> tuple[list[str], Path]:
    """Command line and working directory of a process; both empty if it is None or has just ended."""
    import psutil

    with contextlib.suppress(psutil.Error):
        if process:
            return process.cmdline(), Path(process.cwd())
    return [], Path()
