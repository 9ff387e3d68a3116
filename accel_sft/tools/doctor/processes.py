"""Other programs, asked with a time limit: one that hangs is ended together with what it started."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import accel_sft


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a program printed, and its exit status: minus a signal's number if that ended it, None after its time."""

    status: int | None
    out: str
    error: str

    def reason(self, otherwise: str) -> str:
        """Why a program failed, in a line: the last that it printed as an error, or how it ended."""
        if self.status is not None and self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        lines = [line.strip() for line in (self.error or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else otherwise


def ask(command: Sequence[str], seconds: float | None, more: Mapping[str, str] | None = None) -> Answer:
    """Run a program to its end, at most this long.

    Args:
        more: variables besides those of this process.
    """
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **(more or {})},
        start_new_session=True,
    ) as process:
        try:
            out, error = process.communicate(timeout=seconds)
            return Answer(process.returncode, out, error)
        except subprocess.TimeoutExpired:
            end(process)
            out, error = process.communicate()
            return Answer(None, out, error)
        except BaseException:
            end(process)
            raise


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program that was started as a session of its own, with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def script(module: str, *arguments: str) -> list[str]:
    """The command line of a module of this package, for this Python."""
    return [sys.executable, "-m", f"accel_sft.tools.doctor.{module}", *arguments]


def import_path() -> dict[str, str]:
    """The variable by which another process finds this package, wherever it was started."""
    here = str(Path(accel_sft.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
