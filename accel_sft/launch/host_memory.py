"""Host memory that is left for this process, of its machine and every container it is in; what it does. No torch."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

SYSTEM = Path("/")
"""Below which the kernel's files are looked for."""


def free_bytes() -> int:
    """What may be taken before the machine or a container has none left, with what the system would give back."""
    import psutil

    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _containers())])


def describe() -> str:
    """Free host memory, and containers' limits and kills, in words."""
    import psutil

    now = psutil.virtual_memory()
    words = f"{now.available / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"
    for limit, used in _containers():
        words += f", {used / 2**30:.1f} of the container's {limit / 2**30:.1f} GiB used"
    kills = sum(_field(folder / name, "oom_kill") for folder in _folders() for name in ("memory.events",))
    return f"{words}, {kills} processes killed for it so far" if kills else words


def work(process: psutil.Process) -> tuple[float, int]:
    """Seconds of a core that a process and those below it have used, but for the calling thread, and bytes of files.

    The bytes are those they wrote, and those they had from a disk, for to ask this reads others. What comes through a
    socket does not count; it is used or written.
    """
    import psutil

    seconds, count, below = 0.0, 0, []
    with contextlib.suppress(psutil.Error):
        below = process.children(recursive=True)
    for each in (process, *below):
        with contextlib.suppress(psutil.Error):
            times = each.cpu_times()
            seconds += times.children_user + times.children_system
            own = each.pid == os.getpid()  # of which the system tells hundredths, and the interpreter all
            seconds += time.process_time() - time.thread_time() if own else times.user + times.system
            if hasattr(each, "io_counters"):  # not on macOS
                done = each.io_counters()
                count += done.read_bytes + done.write_chars
    return seconds, count


def _containers() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group around this process that has one, in bytes, from the inside out."""
    machine = SYSTEM / "proc/meminfo"
    total = _field(machine, "MemTotal:") * 1024
    for folder in _folders():
        for limit, usage, kept in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                if not total or most < total:  # version 1 writes no limit as a number above all memory
                    yield most, used - sum(_field(folder / "memory.stat", name) for name in kept)


def _folders() -> Iterator[Path]:
    """Control groups that count this process's memory, of either version, from the inside out."""
    root = SYSTEM / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (SYSTEM / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            base = root / "memory" if controllers else root
            own = base / path.strip("/")
            # in a container the path may be the host's, of which only the root is to be seen
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir())


def _field(file: Path, name: str) -> int:
    """The number behind a name in a file of names and numbers; 0 if it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in file.read_text().splitlines():
            if line.split()[0] == name:
                return int(line.split()[1])
    return 0
