"""A rank that stops answering is named, with its stack, and the run ends: collectives would wait for it for ever.

The main thread of each rank beats wherever it gets on (a forward, an answer, a score, a file); a thread beside it tells
the others, through the launcher's store, how long ago that was. When no rank has got on for the time that is set, the
culprit is one that says nothing any more, or one that is busy with something else than waiting for others.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import psutil

from accel_sft import failure
from accel_sft.launched import restarts
from accel_sft.pulse import beats
from accel_sft.terminal import terminal

SILENT_SECONDS = 5.0
"""Without a sign of a rank's watching thread, which signs every second, before it counts as silent."""
GRACE_SECONDS = 3.0
"""In which all ranks write their stacks, before one of them ends the run."""
_WAITING = ("/torch/distributed/", "/deepspeed/comm/", "/torch/autograd/graph.py")
"""Files of functions in which a rank waits for others; gradients are exchanged within a backward."""
_LIBRARIES = ("/torch/", "/deepspeed/", "/accelerate/", "/transformers/")


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


NEVER = Sign(-1, 0, False, "", "no place it told of")


class Watch(contextlib.AbstractContextManager["Watch"]):
    """Inside, no rank of this run stands still for longer than `seconds` without being named.

    Args:
        seconds: 0: nothing is watched.
        folder: for the stacks, `hang-rank-<n>.txt`.
        ended: told the message, on the rank that ends the run.
    """

    def __init__(self, seconds: float, folder: Path, ended: Callable[[str], None]) -> None:
        self.seconds, self.folder, self.ended = seconds, folder, ended
        self.rank, self.ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.file = folder / f"hang-rank-{self.rank}.txt"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hang-watch", daemon=True)
        self._main = threading.main_thread()
        self._heard: dict[int, tuple[int, float]] = {}  # of each rank, its last tick and when that came
        self._silent: set[int] = set()

    def __enter__(self) -> Watch:
        if self.seconds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.seconds:
            self._thread.join(SILENT_SECONDS)  # what is amid a call to the store as the process ends would abort it

    def _watch(self) -> None:
        pause, tick, seen, still = min(1.0, self.seconds / 4), 0, -1, None
        since = awake = time.monotonic()
        with contextlib.ExitStack() as stack:
            stacks = stack.enter_context(self.file.open("a", encoding="utf-8"))  # an earlier attempt's are kept
            stack.callback(faulthandler.cancel_dump_traceback_later)
            store = _store() if self.ranks > 1 else None
            while not self._over.wait(pause if tick else 0):
                now, tick = time.monotonic(), tick + 1
                if now - awake > SILENT_SECONDS:  # the whole process was stopped, and goes on
                    since += now - awake
                awake = now
                if beats() != seen:
                    seen, since = beats(), now
                    # of its own accord and without the interpreter, which a main thread in C may be holding
                    faulthandler.dump_traceback_later(self.seconds, file=stacks)
                sign = self._sign(tick, now - since)
                signs = _exchange(store, sign, self.rank, self.ranks, ask=sign.stalled >= self.seconds)
                if sign.stalled < self.seconds or not self._all_stand_still(signs, now):
                    still = None
                    continue
                still = still or now
                if now - still >= GRACE_SECONDS:
                    self._end(store, signs)

    def _sign(self, tick: int, stalled: float) -> Sign:
        frame = sys._current_frames().get(self._main.ident)
        host = socket.gethostname()
        return Sign(tick, int(stalled), _waits(frame), host, _place(frame))

    def _all_stand_still(self, signs: dict[int, Sign], now: float) -> bool:
        """Whether no rank gets on; one that has not signed for some seconds does not."""
        for rank, sign in signs.items():
            if self._heard.get(rank, (None, 0.0))[0] != sign.tick:
                self._heard[rank] = sign.tick, now
        self._silent = {rank for rank in signs if now - self._heard[rank][1] > SILENT_SECONDS}
        return all(sign.stalled >= self.seconds for rank, sign in signs.items() if rank not in self._silent)

    def _end(self, store: Any, signs: dict[int, Sign]) -> None:
        """End this rank; one of all ranks names the culprit before."""
        if _speaks(store):
            message = self._message(signs)
            failure.report(f"Error: {message}", message, terminal())
            for rank in self._silent:
                if process := _beside(rank):  # a stopped process hears no other signal, and the launcher waits for it
                    with contextlib.suppress(psutil.Error):
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
                told.append(f"rank {rank} says nothing any more ({_state(rank, sign)}), last seen in {sign.place}")
            else:
                told.append(f"rank {rank} stands in {sign.place}")
        return (
            f"nothing has moved for {max(sign.stalled for sign in signs.values())} seconds (--hang-timeout): "
            f"{'; '.join(told)}; stacks are in {self.folder}/hang-rank-*.txt; go on with --resume auto"
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


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the inside out."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks: in a collective, or, where devices run behind, for its result."""
    for each in _frames(frame)[:8]:
        if any(part in each.f_code.co_filename for part in _WAITING) or each.f_code.co_name == "exchanged":
            return True
    return False


def _place(frame: FrameType | None) -> str:
    standard = sysconfig.get_path("stdlib")
    for each in _frames(frame):
        file = each.f_code.co_filename
        own = "site-packages" in file or not file.startswith((standard, "<frozen"))
        if own and not any(part in file for part in _LIBRARIES):
            return f"{each.f_code.co_name} ({each.f_code.co_filename}:{each.f_lineno})"
    return "no line of Python"


def _beside(rank: int) -> psutil.Process | None:
    """The process of another rank that the same launcher started on this machine."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
    return None


def _state(rank: int, sign: Sign) -> str:
    """What the system says of a rank's process."""
    if sign.host not in ("", socket.gethostname()):
        return f"on {sign.host}"
    process = _beside(rank)
    return f"process {process.pid}, which is {process.status()}" if process else "its process is gone"
