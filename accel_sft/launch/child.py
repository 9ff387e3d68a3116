"""Starts a launch as a child process, ends all of its processes, and decides how it ended."""

import contextlib
import dataclasses
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import psutil

from accel_sft.api.errors import UserError
from accel_sft.io.files import read_object
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.launch.environment import for_launches

MARK = "ACCEL_SFT_LAUNCHED_FOR"
"""Environment variable that marks all processes of a launch, orphans included; its value is the run's folder."""
GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL, in which processes may end by themselves."""
KILL_SECONDS = 60.0
"""Seconds to wait for processes to end after SIGKILL; a process that waits for a device may never end."""
_POLL_SECONDS = 0.5
"""Seconds between two polls of a running launch."""

COMPLETE, FAILED, OUT_OF_MEMORY = "complete", "failed", "out of memory"
HUNG, KILLED, TIME_LIMIT = "hung", "killed", "time limit"
_MESSAGES = {
    OUT_OF_MEMORY: re.compile(
        r"out of (device )?memory|OutOfMemoryError|can't allocate memory|^MemoryError", re.I | re.M
    ),
    HUNG: re.compile(r"nothing has moved for \d+ seconds"),
}
"""Maps a status to the pattern of the messages (of the trainer, torch or the launcher) that show this status."""
_TAIL_BYTES = 1 << 16


class Interrupted(KeyboardInterrupt):
    """Raised when a signal stops a launch, or the work between launches."""

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
    """Run `command` until it ends or `limit_seconds` have passed. It runs in its own session, so that Ctrl-C reaches
    this process only. Its processes are marked with the run's `folder`, and all output goes to `log`.

    When the call ends, even by an interrupt, no process of the launch still runs, or UserError is raised.
    """
    began = time.monotonic()
    variables = {**for_launches(), **environment, MARK: str(folder)}
    over_time = False
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=variables, start_new_session=True
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
        processes = _marked(folder)
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.terminate()
        psutil.wait_procs(processes, GRACE_SECONDS)
    finally:  # a second Ctrl-C skips the wait
        kill_all(folder)


def kill_all(folder: Path) -> None:
    """Kill all processes that are marked with `folder`; raises UserError if some are left after `KILL_SECONDS`."""
    until = time.monotonic() + KILL_SECONDS
    while left := _marked(folder):
        if time.monotonic() > until:
            pids = ", ".join(str(process.pid) for process in left)
            problem = "cannot be killed, and may be waiting for a device or a file system"
            raise UserError(f"process {pids} {problem}; restart the machine, then run the same command again")
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, GRACE_SECONDS)


def _marked(folder: Path) -> list[psutil.Process]:
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # other users' processes, and those that have just ended
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == str(folder):
                processes.append(process)
    return processes


def outcome(ended: Ended, run_dir: RunDir, log: Path, limit_seconds: float) -> tuple[str, str]:
    """Return how a launch ended, such as `COMPLETE`, and the reason: usually the last line of the error message."""
    result, printed = read_object(run_dir.result), _tail(log)
    if ended.over_time:
        return TIME_LIMIT, f"not done after {limit_seconds / 60:g} minutes (--time-limit)"
    if result.get("status") == "complete" and ended.returncode == 0:
        return COMPLETE, ""
    error = result.get("error")
    message = error if isinstance(error, str) else _last_message(printed)
    reason = one_line((message.strip().splitlines() or ["it printed nothing"])[-1], LONGEST_ERROR)
    # a killed process writes no message, and other ranks may not know the cause; the launcher's summary names SIGKILL
    unexplained = not error or "ended without an error message" in message
    if ended.returncode == -signal.SIGKILL or (unexplained and "SIGKILL" in printed):
        return KILLED, "killed (signal 9, which the kernel sends when memory runs out)"
    for status, pattern in _MESSAGES.items():
        if pattern.search(message if error else printed):
            return status, reason
    if ended.returncode < 0:
        return FAILED, f"ended by {signal.Signals(-ended.returncode).name}: {reason}"
    return FAILED, reason


def _tail(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _TAIL_BYTES))
        return file.read().decode(errors="replace")


def _last_message(printed: str) -> str:
    """Return the text of the trainer's first "Error: " line, else Python's last exception, else the last line."""
    if own := re.search(r"^Error: (.*)", printed, re.M):
        return own[1]
    raised = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", printed, re.M)
    lines = [line for line in printed.splitlines() if line.strip()]
    return (raised or lines or [""])[-1]
