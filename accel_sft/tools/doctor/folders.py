"""Checks of the folders that runs write to: whether they can be written, free space, and the clock of their disk."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from accel_sft.io import cache
from accel_sft.launch.deepspeed_ops import is_local
from accel_sft.tools.doctor.check import Finding, ok, problem, warning
from accel_sft.tools.doctor.machine import Machine

GIB = 2**30
LEAST_DISK, LITTLE_DISK = GIB // 4, 5 * GIB
"""Bytes: the least holds a run of the smallest model; a 0.5B model's checkpoint takes 7 GiB."""
CLOCK_SECONDS = 2.0
"""Difference between clocks that a file system's rounding of times explains."""
_TRIAL_BYTES = 1 << 20


@dataclass(frozen=True)
class Place:
    """A folder that runs write to, or would make.

    Attributes:
        what: what is kept there, for whom to look for it.
        mend: how to name another folder.
        needed: whether nothing trains without it.
    """

    what: str
    folder: Path
    mend: str
    needed: bool = True

    @property
    def existing(self) -> Path:
        """The folder, or the nearest above it that is there."""
        folder = self.folder.absolute()
        return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def places(machine: Machine) -> list[Place]:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(caches, "torch_extensions")
    found = [
        Place("runs", machine.runs, "name another with --output-dir"),
        Place("temporary files", Path(tempfile.gettempdir()), "name another in TMPDIR"),
        Place("DeepSpeed's operators", Path(extensions), "name another in TORCH_EXTENSIONS_DIR"),
        Place("token cache", cache.folder(), "name another in ACCEL_SFT_CACHE", needed=False),
    ]
    if find_spec("huggingface_hub"):  # that it is missing is told by another check
        from huggingface_hub.constants import HF_HUB_CACHE

        found.append(Place("models of the hub", Path(HF_HUB_CACHE), "name another in HF_HOME", needed=False))
    return found


def disk(machine: Machine) -> Iterator[Finding]:
    """Whether each folder can be written, and has space; folders of one disk without a finding share a line."""
    enough: dict[int, list[Place]] = {}
    for place in places(machine):
        level = problem if place.needed else warning
        try:
            _written_at(place.existing)
        except OSError as error:
            words = f"{place.what}: {place.folder} cannot be written ({error.strerror})"
            yield level(words, f"make it writable or free space, or {place.mend}")
            continue
        free = shutil.disk_usage(place.existing).free
        if free < LITTLE_DISK:
            less = free < LEAST_DISK
            words = f"{place.what}: {free / GIB:.2f} GiB free in {place.existing}"
            yield (level if less else warning)(words, f"free space, or {place.mend}")
        else:
            enough.setdefault(os.stat(place.existing).st_dev, []).append(place)
    for same in enough.values():
        free = shutil.disk_usage(same[0].existing).free
        yield ok(f"{free / GIB:,.0f} GiB free for {', '.join(place.what for place in same)}")


def clock(machine: Machine) -> Iterator[Finding]:
    """Whether each disk's clock is this machine's: ages of locks and of the cache's entries are told by both."""
    seen: dict[int, Place] = {}
    for place in places(machine):
        seen.setdefault(os.stat(place.existing).st_dev, place)
    apart = []
    for place in seen.values():
        try:
            seconds = _written_at(place.existing) - time.time()
        except OSError:
            continue  # `disk` tells it
        if abs(seconds) > CLOCK_SECONDS:
            side = "ahead of" if seconds > 0 else "behind"
            words = f"the clock of {place.existing} ({place.what}) is {abs(seconds):,.0f} s {side} this machine's"
            apart.append(warning(words, "set both by NTP (timedatectl shows this one); locks and caches go by age"))
    yield from apart or [ok("of each disk as this machine's")]


def shared_operators(machine: Machine) -> Iterator[Finding]:
    """DeepSpeed compiles for the CPU it runs on: another model of CPU may fail with an illegal instruction."""
    place = next(place for place in places(machine) if place.what == "DeepSpeed's operators")
    if not is_local(place.existing):
        words = f"{place.folder} may be shared between machines: operators are compiled for this one's CPU"
        yield warning(words, "where the CPUs differ, set TORCH_EXTENSIONS_DIR to a folder of each machine's own")


def _written_at(folder: Path) -> float:
    """The time of a file that is written now, by the clock of its disk, in seconds of the epoch.

    Raises:
        OSError: the folder cannot be written, or the disk or a quota is full.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * _TRIAL_BYTES)
        file.flush()
        os.fsync(file.fileno())  # a network file system takes the data, and gives the time, at the latest now
        return os.fstat(file.fileno()).st_mtime
