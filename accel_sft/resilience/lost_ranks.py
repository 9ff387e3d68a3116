"""Names the ranks of this machine that ended without an error of their own, and by which signal. No torch."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from accel_sft.launch import host_memory


def lost_ranks(attempt: Path | None) -> str:
    """A sentence about the ranks of this machine that ended without an error of their own; "" if there are none.

    Args:
        attempt: the folder in which torchrun's ranks of this machine record their errors, by local rank.
    """
    if attempt is None or "LOCAL_WORLD_SIZE" not in os.environ:
        return ""
    import psutil

    alive, ended = set(), []
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    ended.append(_exit_code(process.pid))
                else:
                    alive.add(process.environ().get("LOCAL_RANK"))
    count = int(os.environ["LOCAL_WORLD_SIZE"])
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    lost = [n for n in range(count) if str(n) not in alive and not (attempt / str(n) / "error.json").exists()]
    if not alive or not lost:
        return ""
    names = " and ".join(f"rank {first + number}" for number in lost)
    signals = {code & 0x7F for code in ended if code is not None}
    if signals <= {signal.SIGKILL}:
        memory = host_memory.describe()
        return f"{names} was killed (signal 9, as the system does when memory runs out); host memory now: {memory}"
    if signals == {0}:
        return f"{names} ended without an error message"
    ended_by = " and ".join(signal.Signals(number).name for number in sorted(signals - {0}))
    return f"{names} was ended by {ended_by}; its output, if any, is in the run's logs"


def _exit_code(pid: int) -> int | None:
    """The status of a process not waited for yet, as wait() would return it; field 52 of proc(5)."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[-1])
    return None
