"""The hang watch: ends a run in which no rank makes progress, and names the rank that hangs, with its stack.

Without it, collectives would wait for a hung rank for ever. The main thread of each rank sends a heartbeat after each
forward, answer, score or file; a watching thread beside it publishes in the launcher's store how long ago that was.
When no rank has made progress for `--hang-timeout` seconds, the culprits are the ranks that do not respond, and those
whose main thread does something else than wait for other ranks. During start-up, in which a task's code and libraries
load, download or compile, CPU or disk activity counts as progress too, and so does a module that is loaded.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Collection
from typing import IO, Any, NamedTuple, NoReturn

import psutil

from accel_sft.io.heartbeat import activity_counts, heartbeat_count
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import terminal
from accel_sft.resilience import exit, peers
from accel_sft.resilience.ranks import place, process_beside, state, waits, work

SILENT_SECONDS = 5.0
"""Seconds without a publication after which a rank counts as not responding; its thread publishes every second."""
GRACE_SECONDS = 3.0
"""Seconds that all ranks get to write their stacks before one of them ends the run."""
FAILED_SECONDS = 5.0
"""Seconds without progress after which a rank that waits is ended once another one has failed. One that does not wait
gets four times as long, to report its own error and to close its trackers."""
LEAST_CPU, LEAST_BYTES = 0.005, 4096
"""Least activity per second that counts as progress during start-up: CPU seconds, and bytes of files. A main
thread that polls stays below both. The watching thread's own CPU time (3 ms per poll with 120 processes on the machine,
more with more) does not count."""


class Sign(NamedTuple):
    """What a rank's watching thread publishes about its main thread."""

    tick: int  # grows with every publication
    stalled: int  # whole seconds since the last progress
    waiting: bool  # whether it waits for other ranks
    host: str
    place: str  # the innermost line that is not a library's


class Progress:
    """When the main thread last made progress; the stacks written since then are removed once it makes some again.

    Attributes:
        since: that moment, by the monotonic clock.
        written: bytes of stacks that were written and shown: they are no progress.
    """

    def __init__(self, stacks: IO[str], seconds: float) -> None:
        self._stacks, self._seconds = stacks, seconds
        self._begin = self._size = stacks.seek(0, os.SEEK_END)  # behind those of an earlier attempt
        self._seen = -1, 0
        self.since, self.written = time.monotonic(), 0

    def beats(self) -> bool:
        """Whether there was a heartbeat, or a module was loaded, since the last call."""
        before, self._seen = self._seen, (heartbeat_count(), len(sys.modules))
        return self._seen != before

    def begin(self, now: float) -> None:
        """Note progress; if there is none for the seconds of the timeout from now on, the stack is written."""
        self.since, self._size = now, self._stacks.truncate(self._begin)
        if self._seconds < math.inf:  # faulthandler needs no interpreter lock, which a main thread in C may be holding
            faulthandler.dump_traceback_later(self._seconds, file=self._stacks)

    def count_stacks(self) -> None:
        size = os.fstat(self._stacks.fileno()).st_size
        self.written, self._size = self.written + size - self._size, size

    def show_stacks(self) -> None:
        self._stacks.seek(self._begin)
        text = self._stacks.read()
        self.written += len(text) + 1
        print(text, file=terminal(), flush=True)


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Within this context, ends the run if no rank makes progress for `seconds` (0: no limit), and names the ranks that
    hang.

    Stacks and result are written to `run_dir`; without one, the stack of a rank that hangs goes to the terminal.

    A rank that waits for one that failed, on this machine or another, is ended too, also with 0 seconds.
    """

    def __init__(self, seconds: float, run_dir: RunDir | None = None) -> None:
        self.seconds, self.run_dir = seconds or math.inf, run_dir
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._over = threading.Event()
        self._watches = bool(seconds) or self.ranks > 1
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._store: Any = None  # the launcher's key-value store; None with one rank, or if it cannot be reached
        self._exchanging: threading.Thread | None = None  # calls the store, which blocks if its machine is lost
        self._worked: dict[int, tuple[float, int]] = {}  # rank -> CPU seconds and bytes at the last look
        self._heard: dict[int, tuple[int, float]] = {}  # rank -> its last tick and when that came
        self._silent: set[int] = set()

    def __enter__(self) -> Watchdog:
        if self._watches:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._watches:
            self._thread.join(SILENT_SECONDS)  # an unfinished call to the store would abort the process as it exits

    def _watch(self) -> None:
        path = self.run_dir.stacks(self.rank) if self.run_dir else None  # an earlier attempt may have begun it
        with path.open("a", encoding="utf-8") if path else tempfile.TemporaryFile("a+", encoding="utf-8") as stacks:
            self._progress = Progress(stacks, self.seconds)
            try:
                self._watch_main_thread(self._progress)
            finally:
                faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(OSError):  # the run's folder may be gone
            if path and not path.stat().st_size:
                path.unlink()

    def _watch_main_thread(self, progress: Progress) -> None:
        pause, tick = min(1.0, self.seconds / 4), 0
        still, shown = 0.0, False  # since when all ranks hang, and whether the stack has been shown
        failed = math.inf  # when another rank's failure came to be known
        others = peers.joined() if self.ranks > 1 else None
        self._store = others.store if others else None
        main = threading.main_thread().ident
        assert main is not None  # it runs
        awake = time.monotonic()
        while not self._over.wait(pause if tick else 0):
            now, tick = time.monotonic(), tick + 1
            elapsed, awake = now - awake, now
            if elapsed > SILENT_SECONDS:  # the whole process was stopped, and has continued
                progress.since += elapsed
            frame = sys._current_frames()[main]
            waiting = waits(frame)
            progress.count_stacks()
            active = not waiting and activity_counts()
            if progress.beats() or (active and self._has_worked(self.rank, elapsed)):
                progress.begin(now)
            if others and others.failure:
                failed = min(failed, now)
                if now - max(failed, progress.since) >= (FAILED_SECONDS if waiting else 4 * FAILED_SECONDS):
                    self._leave(others.failure + ("; continue with --resume auto" if self.run_dir else ""))
            sign = Sign(tick, int(now - progress.since), waiting, socket.gethostname(), place(frame))
            signs = self._exchange(sign)
            if sign.stalled < self.seconds or not self._all_hang(signs, now, elapsed):
                still, shown = 0.0, False
                continue
            still = still or now
            if not (self.run_dir or waiting or shown) and now - still >= GRACE_SECONDS / 3:
                progress.show_stacks()
                shown = True  # before any rank ends: the launcher then ends the others
            if now - still >= GRACE_SECONDS:
                self._end(signs)

    def _exchange(self, sign: Sign) -> dict[int, Sign]:
        """Publish this rank's sign, and return it; once this rank has stalled for too long, return all ranks' signs."""
        signs = {self.rank: sign}

        def exchange() -> None:
            with contextlib.suppress(RuntimeError):  # the store ends with the launcher, which StopSignals watches
                self._store.set(str(self.rank), json.dumps(sign))
                for rank in range(self.ranks) if sign.stalled >= self.seconds else ():
                    if self._store.check([str(rank)]):
                        signs[rank] = Sign(*json.loads(self._store.get(str(rank))))
                    else:
                        signs[rank] = Sign(-1, 0, False, "", "its start")

        if self._answers():
            self._exchanging = threading.Thread(target=exchange, name="hang-exchange", daemon=True)
            self._exchanging.start()
            self._exchanging.join(SILENT_SECONDS)
        return dict(signs)

    def _answers(self) -> bool:
        """Whether there is a store that has answered the latest call."""
        return self._store is not None and not (self._exchanging and self._exchanging.is_alive())

    def _has_worked(self, rank: int, seconds: float) -> bool:
        """Whether a rank of this machine used enough CPU or files to count, in the `seconds` since the last poll."""
        process = psutil.Process() if rank == self.rank else process_beside(rank)
        before, now = self._worked.get(rank, (0.0, 0)), work(process) if process else (0.0, 0)
        now = (now[0], now[1] - self._progress.written) if rank == self.rank else now
        self._worked[rank] = now
        cpu, count = abs(now[0] - before[0]), abs(now[1] - before[1])  # the totals shrink when a child process ends
        return cpu >= LEAST_CPU * seconds or count >= LEAST_BYTES * seconds

    def _all_hang(self, signs: dict[int, Sign], now: float, elapsed: float) -> bool:
        """Whether no rank makes progress; one that does not respond makes some if it uses CPU or files (in C)."""
        if not self._answers() and self.ranks > 1 and signs[self.rank].waiting:
            return False  # it waits for ranks whose signs cannot be read
        for rank, sign in signs.items():
            if self._heard.get(rank, (None, 0.0))[0] != sign.tick:
                self._heard[rank] = sign.tick, now
        self._silent = {rank for rank in signs if now - self._heard[rank][1] > SILENT_SECONDS}
        if activity_counts() and any(self._has_worked(rank, elapsed) for rank in self._silent):
            return False
        return all(sign.stalled >= self.seconds for rank, sign in signs.items() if rank not in self._silent)

    def _end(self, signs: dict[int, Sign]) -> None:
        """End this rank; before that, one of all ranks reports the culprits."""
        speaks = True
        with contextlib.suppress(RuntimeError):  # where the store has ended, this rank may be the only one left
            speaks = not self._answers() or self._store.add("spoken", 1) == 1
        if speaks:
            self._leave(self._message(signs), kill=self._silent)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def _leave(self, message: str, kill: Collection[int] = ()) -> NoReturn:
        """Report this end of the run, kill these ranks of this machine, and end this one."""
        exit.report(f"Error: {message}", message, terminal())
        for process in filter(None, map(process_beside, kill)):
            with contextlib.suppress(psutil.Error):  # a stopped process handles no other signal
                process.kill()
        if self.run_dir:
            exit.record_end(self.run_dir, message)
        os._exit(1)

    def _message(self, signs: dict[int, Sign]) -> str:
        busy = {rank for rank, sign in signs.items() if rank not in self._silent and not sign.waiting}
        culprits = []
        for rank in sorted(self._silent | busy or signs):
            how = "is stuck in"
            if rank in self._silent:
                how = f"does not respond ({state(rank, signs[rank].host)}), last seen in"
            culprits.append(f"rank {rank} {how} {signs[rank].place}")
        end = "; if it was still working, set a longer --hang-timeout" if activity_counts() else ""
        if self.run_dir:
            end += f"; stacks are in {self.run_dir.stacks('*')}; continue with --resume auto"
        return (
            f"nothing has moved for {max(sign.stalled for sign in signs.values())} seconds (--hang-timeout): "
            f"{'; '.join(culprits)}{end}"
        )
