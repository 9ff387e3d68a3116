"""Starts one launch in its own session, within a time limit, and ends all of its processes."""

import contextlib
import dataclasses
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from accel_sft.api.errors import UserError
from accel_sft.launch.environment import for_launches

_MARK = "ACCEL_SFT_COMPARED"
"""Environment variable holding the run's folder, which marks all processes of a launch, orphans included."""
GRACE_SECONDS = 10.0
"""Seconds that processes have to end after SIGTERM, before SIGKILL."""
KILL_SECONDS = 60.0
"""Seconds within which SIGKILL must have ended the processes; one that waits for a device may never end."""
_POLL_SECONDS = 0.5
"""Seconds between two polls of a running launch."""


class Interrupted(KeyboardInterrupt):
    """A launch, or what comes between launches, was stopped by a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(number).name}")
        self.status = 128 + number  # the status that a shell reports for the signal


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a launch ended: exit status (negative: a signal's number), duration, and whether the time limit ended it."""

    returncode: int
    seconds: float
    over_time: bool


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Context manager in which SIGINT, SIGTERM and SIGHUP raise `Interrupted`, unless they are ignored (nohup)."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heard = [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, raise_it) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@signals_interrupt()
def launch(
    command: list[str],
    environment: Mapping[str, str],
    folder: Path,
    log: Path,
    limit_seconds: float,
    on_poll: Callable[[], None],
    poll_seconds: float = _POLL_SECONDS,
) -> Ended:
    """Run `command` until it ends or `limit_seconds` have passed. It has a session of its own, so that Ctrl-C reaches
    this process only.

    However the call ends, even by an interrupt, no process of the launch is left, or `kill_all` raises UserError.

    Args:
        environment: variables that are added to this process's.
        folder: the run's folder, with which its processes are marked.
        log: the file that gets all output.
        on_poll: called after each poll, every `poll_seconds` while the launch runs.
    """
    began = time.monotonic()
    mine = {**for_launches(), **environment, _MARK: str(folder)}
    over_time = False
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=mine, start_new_session=True
            )
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(poll_seconds)
                break
            if over_time := time.monotonic() - began > limit_seconds:
                break
            on_poll()
        seconds = time.monotonic() - began
    finally:
        end_all(folder)
    return Ended(process.wait(), seconds, over_time)


def end_all(folder: Path) -> None:
    """End all processes that are marked with `folder`: by SIGTERM, and after `GRACE_SECONDS` by SIGKILL."""
    try:
        found = _marked(folder)
        for process in found:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(found, GRACE_SECONDS)
    finally:  # a second Ctrl-C skips the wait
        kill_all(folder)


def kill_all(folder: Path) -> None:
    """Kill all processes that are marked with `folder`, by SIGKILL.

    Raises:
        UserError: some are still there after `KILL_SECONDS`.
    """
    until = time.monotonic() + KILL_SECONDS
    while left := _marked(folder):
        if time.monotonic() > until:
            pids = ", ".join(str(process.pid) for process in left)
            why = "cannot be killed, as if waiting for a device or a file system"
            raise UserError(f"process {pids}: {why}; restart the machine, then give the same command again")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, GRACE_SECONDS)


def _marked(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # other users' processes, and those that have just ended
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == str(folder):
                found.append(process)
    return found
