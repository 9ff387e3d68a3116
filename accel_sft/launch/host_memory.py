"""Free memory of the host, as limited by the machine and by every container around this process. No torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")
"""The root under which the kernel's files are read; tests name another."""


def free_bytes() -> int:
    """Bytes that can be allocated before the machine or a container has none left, reclaimable memory included."""
    import psutil

    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _containers())])


def describe() -> str:
    """Free host memory, and containers' limits and kills, in words."""
    import psutil

    now = psutil.virtual_memory()
    words = f"{now.available / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"
    for limit, used in _containers():
        if limit < now.total:  # version 1 of control groups writes "no limit" as a number above all memory
            words += f", {used / 2**30:.1f} of the container's {limit / 2**30:.1f} GiB used"
    kills = sum(_field(folder / "memory.events", "oom_kill") for folder in _folders())
    return f"{words}, {kills} processes killed for it so far" if kills else words


def _containers() -> Iterator[tuple[int, int]]:
    """Limit and use of each control group around this process that has one, in bytes, from the inside out."""
    for folder in _folders():
        for limit, usage, kept in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
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
            # in a container the path may be the host's, of which only the root is visible
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir())


def _field(file: Path, name: str) -> int:
    """The number behind a name in a file of names and numbers; 0 if it is not there."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
