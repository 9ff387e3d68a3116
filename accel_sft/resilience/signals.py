"""Handles SIGTERM, SIGINT and a lost launcher. After a signal a run can write a checkpoint; a lost launcher ends it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import Any

from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import terminal
from accel_sft.launch.launcher import PARENT, under_launcher, will_restart
from accel_sft.resilience.exit import failed_peer, lost_peers, record_end, report

WATCH_SECONDS = 1.0
"""Seconds between two checks that the launcher is still there."""
ECHO_SECONDS = 5.0
"""Under a launcher, a second signal within this many seconds counts as a copy of the first: Slurm sends a signal to
every process of a job, and the launcher also passes its own signal on to its ranks."""
UNHANDLED_SECONDS = 4.0
"""Seconds after which a signal counts as not handled: the main thread is then in C, and may wait there for a rank that
has ended. The launcher kills its ranks after 30 seconds."""


class Interruption(KeyboardInterrupt):
    """Ends the run after a signal. The trainer catches it, writes a checkpoint, and raises it again."""

    def __init__(self, number: int, step: int, command: str) -> None:
        name = signal.Signals(number).name
        super().__init__(f"stopped by {name} after step {step}, with a checkpoint; to continue: {command}")
        self.status = 128 + number  # as a shell reports the signal


class StopSignals(contextlib.AbstractContextManager["StopSignals"]):
    """Within this context, SIGTERM and SIGINT end the process; while `deferred`, only a second signal ends it.

    If a rank's launcher ends, and no signal came before, the rank ends without writing more files, because a later run
    may already use the folder. A main thread that waits for other ranks in C handles no signal.
    The watching thread then ends the process, but only during start-up or if a rank was lost.
    """

    def __init__(self) -> None:
        self.number = 0  # of the first signal that came
        self._came_at = 0.0
        self.deferred = False  # whether signals are only noted, for a loop that checks `number`
        self.run_dir: RunDir | None = None  # its result.json gets the reason if the watching thread ends this rank
        self.to_continue = ""  # the command that continues the run, once it has a folder
        self._launcher = PARENT if under_launcher() else None
        # the main thread may wait in C for other ranks, even for ranks started by hand
        self._watches = self._launcher is not None or os.environ.get("WORLD_SIZE", "1") != "1"
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()

    def __enter__(self) -> StopSignals:
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN  # as in a script's background commands
        numbers = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        # a process that a task forks (to run an answer with a timeout, say) handles signals as if there were no run
        os.register_at_fork(after_in_child=self._leave_alone)
        if self._watches:
            arriving, writing = os.pipe()  # Python writes each signal's number here, whatever the main thread is doing
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(arriving,), name="launcher-watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.failing()
        self._ended.set()
        self._leave_alone()

    def _leave_alone(self) -> None:
        """Restore the previous signal handlers; a second call does nothing."""
        if self._before and self._watches:
            signal.set_wakeup_fd(-1)
        while self._before:
            signal.signal(*self._before.popitem())

    def exit_if_orphaned(self) -> None:
        """End the process if the launcher has ended; call this before anything is written."""
        if self._launcher is not None and os.getppid() != self._launcher and not self.number:
            _log("the launcher has ended: this rank ends without writing anything more\n")
            os._exit(1)

    def failing(self) -> None:
        """Prepare to end with an error: end at once if the launcher has ended, else ignore SIGTERM from now on. The
        launcher sends it within a tenth of a second after a rank has ended, before other ranks can report errors."""
        self.exit_if_orphaned()
        if self._launcher is not None:
            self._before.pop(signal.SIGTERM, None)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def lost_peers(self, seconds: float = 0.0) -> str:
        """The sentence from `exit.lost_peers`, then how to continue the run; "" if no rank was lost."""
        lost = lost_peers(seconds)
        if lost and will_restart():
            return f"{lost}; the launcher starts the ranks again"
        return f"{lost}; to continue: {self.to_continue}" if lost and self.to_continue else lost

    def _watch(self, arriving: int) -> None:
        came: dict[int, float] = {}
        while not self._ended.is_set():
            if select.select([arriving], [], [], WATCH_SECONDS)[0]:
                new = {number: time.monotonic() for number in os.read(arriving, 64) if number in self._before}
                # the launcher sends SIGTERM too if a rank has failed or ended: then no checkpoint will be written
                if new and not came and self.deferred and not (failed_peer() or lost_peers()):
                    self._announce(min(new))
                came |= new
            for number, then in came.items():
                if time.monotonic() - then < UNHANDLED_SECONDS:
                    continue
                # A collective of a GPU waits for a lost rank in C, where neither an error nor a signal reaches Python.
                # But after a signal that Python has handled, other ranks may have recorded the signal, not a failure.
                if lost := self.lost_peers() or ("" if self.number else failed_peer()):
                    report(f"Error: {lost}", lost, terminal())
                    if self.run_dir:
                        record_end(self.run_dir, lost)
                    os._exit(1)
                if not self.deferred and not self.number:
                    name = signal.Signals(number).name
                    _log(f"rank {os.environ.get('RANK', '0')} was ended by {name} during start-up\n")
                    os._exit(128 + number)
            self.exit_if_orphaned()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.number and (self._launcher is None or time.monotonic() - self._came_at > ECHO_SECONDS):
            os._exit(128 + number)
        if self.number:
            return
        self.number, self._came_at = number, time.monotonic()
        if not self.deferred:
            raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")
        if not self._watches:
            self._announce(number)

    def _announce(self, number: int) -> None:
        if os.environ.get("RANK", "0") == "0":
            name = signal.Signals(number).name
            _log(f"{name}: the run will write a checkpoint and end; a second signal ends it at once\n")


def _log(line: str) -> None:
    """Write to the terminal from a signal handler, which may have interrupted a print()."""
    with contextlib.suppress(OSError, ValueError):
        os.write(terminal().fileno(), line.encode())
