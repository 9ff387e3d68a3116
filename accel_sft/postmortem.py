"""What became of a rank that is gone without a word, as far as those beside it can tell. No torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def lost_ranks(attempt: Path | None) -> str:
    """Which ranks of this machine are gone without an error of their own, and the memory there is; "" if none.

    Args:
        attempt: the folder in which torchrun's ranks of this machine record their errors, by local rank.
    """
    if attempt is None or "LOCAL_WORLD_SIZE" not in os.environ:
        return ""
    import psutil

    alive = set()
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    alive.add(process.environ().get("LOCAL_RANK"))
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    lost = [n for n in range(count) if str(n) not in alive and not (attempt / str(n) / "error.json").exists()]
    if not alive or not lost:
        return ""
    names = " and ".join(f"rank {first + number}" for number in lost)
    return f"{names} was killed (signal 9, as the system does when memory runs out); host memory now: {_memory()}"


def _memory() -> str:
    """Host memory, and this container's limit and kills where there is one."""
    import psutil

    now = psutil.virtual_memory()
    told = f"{now.available / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"
    limit, used = _number("memory.max"), _number("memory.current")
    if limit is not None and used is not None:
        told += f", {used / 2**30:.1f} of the container's {limit / 2**30:.1f} GiB used"
    with contextlib.suppress(OSError, ValueError, IndexError):
        events = dict(line.split() for line in (CGROUP / "memory.events").read_text().splitlines())
        if int(events.get("oom_kill", 0)):
            told += f", {events['oom_kill']} processes killed for it so far"
    return told


def _number(name: str) -> int | None:
    try:
        return int((CGROUP / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
