"""Measures free host memory within the limits of the machine and of every cgroup of this process, without torch."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

SYSTEM = Path("/")
"""The directory in which proc/ and sys/ are looked up; tests set it to a temporary one."""


def free_bytes() -> int:
    """Return how many bytes can still be allocated; memory that the kernel can reclaim (page cache) counts as free."""
    import psutil

    return min([psutil.virtual_memory().available, *(limit - used for limit, used in _containers())])


def describe() -> str:
    """Say how much memory is free, each container's limit and use, and how many processes were OOM-killed."""
    import psutil

    now = psutil.virtual_memory()
    words = f"{now.available / 2**30:.1f} of {now.total / 2**30:.1f} GiB free"
    for limit, used in _containers():
        if limit < now.total:  # if there is no limit, cgroup v1 reports a number larger than any memory
            words += f", {used / 2**30:.1f} of the container's {limit / 2**30:.1f} GiB used"
    # the maximum, since a cgroup's count includes its children's
    kills = max((field(folder / "memory.events", "oom_kill") for folder in cgroups()), default=0)
    return f"{words}, processes OOM-killed so far: {kills}" if kills else words


def _containers() -> Iterator[tuple[int, int]]:
    """Yield limit and use (page cache not counted), in bytes, of each cgroup of this process that limits memory."""
    for folder in cgroups():
        for limit, usage, cached in (
            ("memory.max", "memory.current", ("inactive_file", "active_file")),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
        ):
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max"
                most, used = int((folder / limit).read_text()), int((folder / usage).read_text())
                yield most, used - sum(field(folder / "memory.stat", name) for name in cached)


def cgroups(controller: str = "memory") -> Iterator[Path]:
    """Yield the folders of the cgroups (v1 or v2) that limit this process's memory or `cpu` time, innermost first."""
    root = SYSTEM / "sys/fs/cgroup"
    with contextlib.suppress(OSError):
        for line in (SYSTEM / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            base = root / controllers
            own = base / path.strip("/")
            # in a container the path may be the host's, and only the root exists: folders that do not exist are skipped
            yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(base) and folder.is_dir())


def field(file: Path, name: str) -> int:
    """Return the value of `name` in a file whose lines are a name and a value; 0 if the file or the name is missing."""
    with contextlib.suppress(OSError):
        for line in file.read_text().splitlines():
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    return 0
