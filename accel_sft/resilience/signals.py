"""How a run is stopped from outside: a signal ends it in order, a launcher that is gone at once (law 3)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType

from accel_sft.io.terminal import terminal
from accel_sft.launch.info import PARENT, under_launcher

WATCH_SECONDS = 1.0
"""Between looks at whether the launcher is still there."""
DEAF_SECONDS = 4.0
"""After a signal that the main thread has not heard: it is in C, and may wait there for a rank that is gone. The
launcher kills after 30."""
GONE = 1
"""Exit status of a rank without a launcher."""
_DEFERRED = "{name}: the run ends once it is in order; a second signal ends it at once\n"


class Interruption(KeyboardInterrupt):
    """A signal was followed: the run has a checkpoint, and ends.

    Attributes:
        status: the exit status a shell reports for the signal.
    """

    def __init__(self, number: int, step: int) -> None:
        super().__init__(
            f"stopped by {signal.Signals(number).name} after step {step}, with a checkpoint; to go on: the same "
            "command with --resume auto and this run's --output-dir"
        )
        self.status = 128 + number


_inside: StopSignals | None = None


def _forked() -> None:
    """What a task forks, to run an answer with a timeout, say, dies by a signal; and it is not this process's."""
    if _inside is not None:
        _inside.leave_alone()


os.register_at_fork(after_in_child=_forked)


class StopSignals(contextlib.AbstractContextManager["StopSignals"]):
    """Inside, SIGTERM and SIGINT end the process, or while `deferred` says so are noted; a second one ends it at once.

    A rank whose launcher is gone ends within two seconds, without a word in any file: a later run may already write
    there. One that was told to stop before that is left to write its checkpoint. One that hears no signal as it starts,
    for it waits in C for others to come, ends all the same.

    Attributes:
        asked: number of the signal that came while `deferred`; 0: none.
        deferred: whether signals are noted, for a loop that looks at `asked`.
    """

    def __init__(self) -> None:
        self.asked, self.deferred = 0, False
        self._launcher = PARENT if under_launcher() else None
        self._before: dict[int, object] = {}
        self._failing = False
        self._ended = threading.Event()

    def __enter__(self) -> StopSignals:
        global _inside
        _inside = self
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._heard) for number in (signal.SIGTERM, signal.SIGINT)}
        if self._launcher is not None:
            threading.Thread(target=self._watch, args=(self._arriving(),), name="launcher-watch", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        global _inside
        _inside = None
        if kind is not None:
            self.failing()
        self._ended.set()
        self.leave_alone()

    def leave_alone(self) -> None:
        """Signals mean what they meant before."""
        for number, handler in self._before.items():
            if not (self._failing and number == signal.SIGTERM):
                signal.signal(number, handler)
        if self._before and self._launcher is not None:
            signal.set_wakeup_fd(-1)

    def exit_if_orphaned(self) -> None:
        """End now if the launcher is gone: to be called before anything is written."""
        if self._launcher is not None and os.getppid() != self._launcher and not self.asked:
            _log("the launcher is gone: this rank ends without writing anything more\n")
            os._exit(GONE)

    def failing(self) -> None:
        """This rank ends with an error: without a word if the launcher is gone, else not before it has said it.

        The launcher that misses one rank sends the others SIGTERM within a tenth of a second.
        """
        self.exit_if_orphaned()
        if self._before and self._launcher is not None:
            self._failing = True
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _arriving(self) -> int:
        """A pipe into which the system writes the number of each signal, whatever the main thread is doing."""
        reading, writing = os.pipe()
        if self._before:
            os.set_blocking(writing, False)
            signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        return reading

    def _watch(self, arriving: int) -> None:
        came: dict[int, float] = {}
        begun = False  # from then on ranks are connected, and notice themselves that one is gone
        while not self._ended.is_set():
            if select.select([arriving], [], [], WATCH_SECONDS)[0]:
                came |= {number: time.monotonic() for number in os.read(arriving, 64) if number in self._before}
            begun = begun or self.deferred
            for number, then in came.items():
                if not (begun or self.asked) and time.monotonic() - then > DEAF_SECONDS:
                    _log(f"rank {os.environ.get('RANK', '0')}: {signal.Signals(number).name} amid the start: ended\n")
                    os._exit(128 + number)
            self.exit_if_orphaned()

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            os._exit(128 + number)
        self.asked = number
        if not self.deferred:
            raise KeyboardInterrupt(f"interrupted by {signal.Signals(number).name}")
        if os.environ.get("RANK", "0") == "0":
            _log(_DEFERRED.format(name=signal.Signals(number).name))


def _log(line: str) -> None:
    """At the terminal, from wherever the program is: print() could be amid another print()."""
    with contextlib.suppress(OSError, ValueError):
        os.write(terminal().fileno(), line.encode())
