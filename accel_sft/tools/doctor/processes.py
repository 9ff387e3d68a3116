"""Runs other programs with a time limit; a program that hangs is killed together with its children."""

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
class ProcessAnswer:
    """What a program printed, and its exit status.

    Attributes:
        status: minus the signal's number if a signal ended the program; None if the time limit did.
        out, error: its standard output and standard error.
    """

    status: int | None
    out: str
    error: str

    def reason(self, otherwise: str) -> str:
        """Why a program failed, in one line: the signal that ended it, the last line it printed, or `otherwise`."""
        if self.status is not None and self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        lines = [line.strip() for line in (self.error or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else otherwise


def ask(command: Sequence[str], seconds: float | None, more: Mapping[str, str] | None = None) -> ProcessAnswer:
    """Run a program to its end, or kill it after the time limit.

    Args:
        seconds: the time limit; None for no limit.
        more: environment variables besides those of this process.
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
            return ProcessAnswer(process.returncode, out, error)
        except subprocess.TimeoutExpired:
            end(process)
            out, error = process.communicate()
            return ProcessAnswer(None, out, error)
        except BaseException:
            end(process)
            raise


def end(process: subprocess.Popen[str]) -> None:
    """Kill a program that was started in its own session, together with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def script(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package with this Python."""
    return [sys.executable, "-m", f"accel_sft.tools.doctor.{module}", *arguments]


def import_path() -> dict[str, str]:
    """PYTHONPATH with which another process finds this package, whatever its working directory."""
    here = str(Path(accel_sft.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}
