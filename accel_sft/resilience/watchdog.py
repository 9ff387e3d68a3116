"""A rank that stops answering is named, with its stack, and the run ends: collectives would wait for it for ever.

The main thread of each rank beats wherever it gets on (a forward, an answer, a score, a file); a thread beside it tells
the others, through the launcher's store, how long ago that was. When no rank has got on for the time that is set, the
culprit is one that says nothing any more, or one that is busy with something else than waiting for others. As a run
starts, in a task's code and in libraries that load, download or compile, to be at work is to get on.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import psutil

from accel_sft.io.heartbeat import heartbeat, heartbeat_count
from accel_sft.io.run_dir import stacks_file
from accel_sft.io.terminal import terminal
from accel_sft.launch import host_memory
from accel_sft.launch.info import restarts
from accel_sft.resilience import exit
from accel_sft.resilience.stacks import place, process_beside, state, waits

SILENT_SECONDS = 5.0
"""Without a sign of a rank's watching thread, which signs every second, before it counts as silent."""
GRACE_SECONDS = 3.0
"""In which all ranks write their stacks, before one of them ends the run."""
LEAST_CPU, LEAST_BYTES = 0.005, 4096
"""Of a core, and from or to files in a second: what a process does that is at work. One that polls does less."""


class Sign(NamedTuple):
    """What a rank's watching thread says of its main thread.

    Attributes:
        tick: a number that grows with every sign.
        stalled: whole seconds since it got on.
        waiting: whether it waits for other ranks.
        place: the innermost line that is not a library's.
    """

    tick: int
    stalled: int
    waiting: bool
    host: str
    place: str


NEVER = Sign(-1, 0, False, "", "its start")


class Watchdog(contextlib.AbstractContextManager["Watchdog"]):
    """Inside, no rank of this run stands still for longer than `seconds` without being named.

    Args:
        seconds: 0: nothing is watched.
        folder: for the stacks, `hang-rank-<n>.txt`; None: that of a rank which is named goes to the terminal.
        ended: told the message, on the rank that ends the run.
    """

    def __init__(
        self, seconds: float, folder: Path | None = None, ended: Callable[[str], None] = lambda message: None
    ) -> None:
        self.seconds, self.folder, self.ended = seconds, folder, ended
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._main = threading.main_thread()
        self._heartbeats_only = False
        self._worked: dict[int, tuple[float, int]] = {}  # what ranks had done when they were looked at
        self._heard: dict[int, tuple[int, float]] = {}  # of each rank, its last tick and when that came
        self._silent: set[int] = set()

    def __enter__(self) -> Watchdog:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.seconds:
            self._thread.join(SILENT_SECONDS)  # what is amid a call to the store as the process ends would abort it

    @contextlib.contextmanager
    def heartbeats_only(self) -> Iterator[None]:
        """Inside, only beats count: there are some wherever it gets on."""
        heartbeat()
        self._heartbeats_only = True
        try:
            yield
        finally:
            self._heartbeats_only = False

    def _watch(self) -> None:
        pause, tick, seen, still, shown = min(1.0, self.seconds / 4), 0, -1, 0.0, False
        since = awake = time.monotonic()
        with self._stacks() as stacks, contextlib.ExitStack() as stack:
            stack.callback(faulthandler.cancel_dump_traceback_later)
            store, before = _store() if self.ranks > 1 else None, stacks.seek(0, os.SEEK_END)
            while not self._over.wait(pause if tick else 0):
                now, tick = time.monotonic(), tick + 1
                if now - awake > SILENT_SECONDS:  # the whole process was stopped, and goes on
                    since += now - awake
                if heartbeat_count() != seen or self._prepares(now - awake):
                    seen, since = heartbeat_count(), now
                    stacks.truncate(before)  # of a rank that got on after all
                    # of its own accord and without the interpreter, which a main thread in C may be holding
                    faulthandler.dump_traceback_later(self.seconds, file=stacks)
                sign = self._sign(tick, now - since)
                signs = _exchange(store, sign, self.rank, self.ranks, ask=sign.stalled >= self.seconds)
                elapsed, awake = now - awake, now
                if sign.stalled < self.seconds or not self._all_stand_still(store, signs, now, elapsed):
                    still, shown = 0.0, False
                    continue
                still = still or now
                if not (self.folder or sign.waiting or shown) and now - still >= GRACE_SECONDS / 3:
                    stacks.seek(before)
                    print(stacks.read(), file=terminal(), flush=True)
                    shown = True  # before any rank ends, whereupon the launcher ends the others
                if now - still >= GRACE_SECONDS:
                    self._end(store, signs)

    @contextlib.contextmanager
    def _stacks(self) -> Iterator[IO[str]]:
        """Where the interpreter writes them; a file of the run, which keeps an earlier attempt's, is gone if empty."""
        if self.folder is None:
            with tempfile.TemporaryFile("a+", encoding="utf-8") as file:
                yield file
            return
        path = stacks_file(self.folder, self.rank)
        with path.open("a", encoding="utf-8") as file:
            yield file
        with contextlib.suppress(OSError):  # the folder may be what was lost
            if not path.stat().st_size:
                path.unlink()

    def _prepares(self, seconds: float) -> bool:
        """Whether this rank is at work where that is enough, on something else than waiting for other ranks."""
        frame = sys._current_frames().get(self._main.ident)
        return not self._heartbeats_only and not waits(frame) and self._is_at_work(self.rank, seconds)

    def _is_at_work(self, rank: int, seconds: float) -> bool:
        """Whether a rank of this machine has used the CPU or files in the seconds since it was looked at before."""
        process = psutil.Process() if rank == self.rank else process_beside(rank)
        before, now = self._worked.get(rank, (0.0, 0)), host_memory.work(process) if process else (0.0, 0)
        self._worked[rank] = now
        cpu, count = abs(now[0] - before[0]), abs(now[1] - before[1])  # less: a process below it has ended
        return cpu >= LEAST_CPU * seconds or count >= LEAST_BYTES * seconds

    def _sign(self, tick: int, stalled: float) -> Sign:
        frame = sys._current_frames().get(self._main.ident)
        return Sign(tick, int(stalled), waits(frame), socket.gethostname(), place(frame))

    def _all_stand_still(self, store: Any, signs: dict[int, Sign], now: float, elapsed: float) -> bool:
        """Whether no rank gets on; one that has not signed for some seconds does not, unless it is at work in C."""
        if store is None and self.ranks > 1 and signs[self.rank].waiting:
            return False  # for others that cannot be asked
        for rank, sign in signs.items():
            if self._heard.get(rank, (None, 0.0))[0] != sign.tick:
                self._heard[rank] = sign.tick, now
        self._silent = {rank for rank in signs if now - self._heard[rank][1] > SILENT_SECONDS}
        if not self._heartbeats_only and any(self._is_at_work(rank, elapsed) for rank in self._silent):
            return False
        return all(sign.stalled >= self.seconds for rank, sign in signs.items() if rank not in self._silent)

    def _end(self, store: Any, signs: dict[int, Sign]) -> None:
        """End this rank; one of all ranks names the culprit before."""
        if _speaks(store):
            message = self._message(signs)
            exit.report(f"Error: {message}", message, terminal())
            for rank in self._silent:
                if process := process_beside(rank):
                    with contextlib.suppress(psutil.Error):  # stopped, it hears no other signal, and is waited for
                        process.kill()
            telling = threading.Thread(target=self.ended, args=(message,), daemon=True)
            telling.start()
            telling.join(GRACE_SECONDS)  # the disk may be what hangs
        else:
            time.sleep(GRACE_SECONDS)
        os._exit(1)

    def _message(self, signs: dict[int, Sign]) -> str:
        busy = {rank for rank, sign in signs.items() if rank not in self._silent and not sign.waiting}
        told = []
        for rank in sorted(self._silent | busy or signs):
            sign = signs[rank]
            if rank in self._silent:
                told.append(f"rank {rank} says nothing any more ({state(rank, sign.host)}), last seen in {sign.place}")
            else:
                told.append(f"rank {rank} stands in {sign.place}")
        end = "" if self._heartbeats_only else "; if it was at work, a longer --hang-timeout waits for it"
        if self.folder:
            end += f"; stacks are in {stacks_file(self.folder, '*')}; go on with --resume auto"
        return (
            f"nothing has moved for {max(sign.stalled for sign in signs.values())} seconds (--hang-timeout): "
            f"{'; '.join(told)}{end}"
        )


def _store() -> Any:
    """The launcher's, where ranks have met; None if it cannot be reached."""
    from torch.distributed import PrefixStore, TCPStore

    address, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    try:
        store = TCPStore(address, port, is_master=False, timeout=datetime.timedelta(seconds=20), wait_for_workers=False)
    except (RuntimeError, ValueError, OSError):
        return None
    return PrefixStore(f"watch-{restarts()}", store)


def _speaks(store: Any) -> bool:
    """Whether this rank is the first to know, or the only one left to say so."""
    try:
        return store is None or store.add("spoken", 1) == 1
    except RuntimeError:
        return True


def _exchange(store: Any, sign: Sign, rank: int, ranks: int, ask: bool) -> dict[int, Sign]:
    """Tell this rank's sign; if asked to, what all ranks have told."""
    found = {rank: sign}
    if store is not None:
        with contextlib.suppress(RuntimeError):  # it is gone with the launcher, which others look after
            store.set(str(rank), "\t".join(map(str, sign)))
            for other in range(ranks) if ask else ():
                if other != rank:
                    told = store.get(str(other)).decode().split("\t", 4) if store.check([str(other)]) else NEVER
                    tick, stalled, waiting, host, place = told
                    found[other] = Sign(int(tick), int(stalled), str(waiting) == "True", host, place)
    return found
