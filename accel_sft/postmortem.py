"""What became of a rank that is gone without a word, as far as those beside it can tell. No torch."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from accel_sft import host


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
    return f"{names} was killed (signal 9, as the system does when memory runs out); host memory now: {host.told()}"
