"""The hang watch: ends a run in which no rank makes progress, and names the rank that hangs, with its stack.

Without it, collectives would wait for a hung rank for ever. The main thread of each rank sends a heartbeat after each
forward, answer, score or file; a watching thread publishes in the launcher's store how old the last heartbeat is.
When no rank has made progress for `--hang-timeout` seconds, the culprits are the ranks that do not respond, and those
whose main thread does not wait for other ranks. During start-up, in which a task's code and libraries load, download
or compile, activity of CPU or disk and newly loaded modules count as progress too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Collection
from typing import Any, NamedTuple, NoReturn

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
"""Seconds without progress after which a waiting rank is ended, once another rank has failed. A rank that works gets
four times as long, to report its own error and to close its trackers."""
LEAST_CPU, LEAST_BYTES = 0.005, 4096
"""Least activity per second that counts as progress during start-up: CPU seconds, and bytes of files. A main thread
that only polls stays below both. The watching thread's own CPU time (3 ms per poll with 120 processes on the machine,
more with more) does not count."""


class Sign(NamedTuple):
    """What the watching thread of a rank publishes about the rank's main thread."""

    tick: int  # number of the publication
    stalled: int  # whole seconds since the last progress
    waiting: bool  # whether the main thread waits for other ranks
    host: str
    place: str  # the innermost line that is not a library's


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Context manager that ends the run if no rank makes progress for `seconds` (0: no limit), and names the ranks that
    hang. It also ends a rank that waits for a failed rank, on this machine or another, even with 0 seconds."""

    def __init__(self, seconds: float, run_dir: RunDir | None = None) -> None:
        self.seconds, self.run_dir = seconds or math.inf, run_dir
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._over = threading.Event()
        self._watches = bool(seconds) or self.ranks > 1
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._store: Any = None  # the launcher's key-value store; None with one rank, or if it cannot be reached
        self._exchanging: threading.Thread | None = None  # calls the store, which blocks if its machine is lost
        self._worked: dict[int, tuple[float, int]] = {}  # rank -> CPU seconds and bytes at the last poll
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
        pause, tick = min(1.0, self.seconds / 4), 0
        since = awake = time.monotonic()  # when the main thread last made progress, and this thread last polled
        still = 0.0  # since when all ranks hang
        failed = math.inf  # when another rank's failure became known
        beats = -1, 0  # heartbeats and loaded modules so far
        others = peers.joined() if self.ranks > 1 else None
        self._store = others.store if others else None
        main = threading.main_thread().ident
        assert main is not None  # the main thread runs
        while not self._over.wait(pause if tick else 0):
            now, tick = time.monotonic(), tick + 1
            elapsed, awake = now - awake, now
            if elapsed > SILENT_SECONDS:  # the whole process was stopped, and has continued
                since += elapsed
            frame = sys._current_frames()[main]
            waiting = waits(frame)
            before, beats = beats, (heartbeat_count(), len(sys.modules))
            active = not waiting and activity_counts()
            if beats != before or (active and self._has_worked(self.rank, elapsed)):
                since = now
            if others and others.failure:
                failed = min(failed, now)
                if now - max(failed, since) >= (FAILED_SECONDS if waiting else 4 * FAILED_SECONDS):
                    self._leave(others.failure + ("; continue with --resume auto" if self.run_dir else ""))
            sign = Sign(tick, int(now - since), waiting, socket.gethostname(), place(frame))
            signs = self._exchange(sign)
            if sign.stalled < self.seconds or not self._all_hang(signs, now, elapsed):
                still = 0.0
                continue
            if not still:
                still = now
                self._write_stacks(waiting)
            if now - still >= GRACE_SECONDS:
                self._end(signs)

    def _write_stacks(self, waiting: bool) -> None:
        """Write the stacks of all threads to the run's logs; without a run, to the terminal, unless this rank waits."""

        def write() -> None:
            with contextlib.suppress(OSError):  # the run's folder may be gone
                if self.run_dir:
                    with self.run_dir.stacks(self.rank).open("a") as file:
                        faulthandler.dump_traceback(file)
                elif not waiting:
                    faulthandler.dump_traceback(terminal())

        writing = threading.Thread(target=write, daemon=True)  # the disk may hang too
        writing.start()
        writing.join(GRACE_SECONDS)
        self._has_worked(self.rank, 1.0)  # these writes are no progress

    def _exchange(self, sign: Sign) -> dict[int, Sign]:
        """Publish this rank's sign, and return it; if this rank has stalled for too long, return all ranks' signs."""
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
        """Whether a rank of this machine has used enough CPU or files in the last `seconds` to count as active."""
        process = psutil.Process() if rank == self.rank else process_beside(rank)
        before, now = self._worked.get(rank, (0.0, 0)), work(process) if process else (0.0, 0)
        self._worked[rank] = now
        cpu, count = abs(now[0] - before[0]), abs(now[1] - before[1])  # the totals shrink when a child process ends
        return cpu >= LEAST_CPU * seconds or count >= LEAST_BYTES * seconds

    def _all_hang(self, signs: dict[int, Sign], now: float, elapsed: float) -> bool:
        """Whether no rank makes progress. During start-up, a silent rank that uses CPU or files makes progress."""
        if not self._answers() and self.ranks > 1 and signs[self.rank].waiting:
            return False  # this rank waits for ranks whose signs cannot be read
        for rank, sign in signs.items():
            if self._heard.get(rank, (None, 0.0))[0] != sign.tick:
                self._heard[rank] = sign.tick, now
        self._silent = {rank for rank in signs if now - self._heard[rank][1] > SILENT_SECONDS}
        if activity_counts() and any(self._has_worked(rank, elapsed) for rank in self._silent):
            return False
        return all(sign.stalled >= self.seconds for rank, sign in signs.items() if rank not in self._silent)

    def _end(self, signs: dict[int, Sign]) -> None:
        """End this rank. The first rank to call this reports the culprits; other ranks wait for GRACE_SECONDS."""
        speaks = True
        with contextlib.suppress(RuntimeError):  # if the store has ended, this rank may be the only one left
            speaks = not self._answers() or self._store.add("spoken", 1) == 1
        if speaks:
            self._leave(self._message(signs), kill=self._silent)
        time.sleep(GRACE_SECONDS)
        os._exit(1)

    def _leave(self, message: str, kill: Collection[int] = ()) -> NoReturn:
        """Report why the run ends, kill the ranks in `kill` that run on this machine, and end this rank."""
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
        advice = "; if it was still working, set a longer --hang-timeout" if activity_counts() else ""
        if self.run_dir:
            advice += f"; stacks are in {self.run_dir.stacks('*')}; continue with --resume auto"
        return (
            f"nothing has moved for {max(sign.stalled for sign in signs.values())} seconds (--hang-timeout): "
            f"{'; '.join(culprits)}{advice}"
        )
