"""Starts one launch in processes of its own, within a time limit, and sees that none of them is left."""

import contextlib
import dataclasses
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

_MARK = "ACCEL_SFT_COMPARED"
"""The variable by which the processes of a launch are found, also those whose parent has died: the run's folder."""
GRACE_SECONDS = 10.0
"""For processes to end after SIGTERM."""
_LOOK_SECONDS = 0.5


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a launch ended: its exit status (negative: the signal's number), its seconds, whether the limit ended it."""

    returncode: int
    seconds: float
    over_time: bool


def launch(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    limit_seconds: float,
    on_look: Callable[[], None],
) -> Ended:
    """Run `command` to its end, in the user's environment and a session of its own: Ctrl-C reaches the caller alone.

    Whatever ends the call, an interrupt too, no process of the launch is left.

    Args:
        folder: the run's, by which its processes are marked.
        log: gets what is printed.
        on_look: called twice a second.
    """
    began = time.monotonic()
    mine = {**os.environ, **environment, _MARK: str(folder)}
    over_time = False
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=mine, start_new_session=True
            )
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_SECONDS)
                break
            if over_time := time.monotonic() - began > limit_seconds:
                break
            on_look()
        seconds = time.monotonic() - began
    finally:
        end_all(folder)
    return Ended(process.wait(), seconds, over_time)


def end_all(folder: Path) -> None:
    """End the processes of the launch whose run has this folder: all get SIGTERM, and what is left SIGKILL."""
    try:
        found = _marked(folder)
        for process in found:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
        psutil.wait_procs(found, GRACE_SECONDS)
    finally:  # a second Ctrl-C does not wait
        while left := _marked(folder):
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(left, GRACE_SECONDS)


def _marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # others' processes, and those that have just ended
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == str(folder):
                found.append(process)
    return found
