"""Checks the folders that runs write to: whether they are writable, their free space, and the clock of their disk."""

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
"""Free bytes below which a folder is a problem (it could not hold a run of the smallest model) or a warning.

For comparison: a checkpoint of a 0.5B model takes 7 GiB.
"""
CLOCK_SECONDS = 2.0
"""Maximum difference between clocks, in seconds, for which a file system's rounding of times may be the reason."""
_TRIAL_BYTES = 1 << 20
"""Size of the file that is written as a trial."""


@dataclass(frozen=True)
class FolderUse:
    """A folder that runs write to, or would create.

    Attributes:
        what: what is kept there, in the report's words.
        fix: how the user names another folder.
        needed: whether training fails without it.
    """

    what: str
    folder: Path
    fix: str
    needed: bool = True

    @property
    def existing(self) -> Path:
        """The folder, or its nearest parent that exists."""
        folder = self.folder.absolute()
        return next((each for each in (folder, *folder.parents) if each.exists()), Path("/"))


def places(machine: Machine) -> list[FolderUse]:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    extensions = os.environ.get("TORCH_EXTENSIONS_DIR") or Path(caches, "torch_extensions")
    found = [
        FolderUse("runs", machine.runs, "name another with --output-dir"),
        FolderUse("temporary files", Path(tempfile.gettempdir()), "name another in TMPDIR"),
        FolderUse("DeepSpeed's operators", Path(extensions), "name another in TORCH_EXTENSIONS_DIR"),
        FolderUse("token cache", cache.folder(), "name another in ACCEL_SFT_CACHE", needed=False),
    ]
    if find_spec("huggingface_hub"):  # another check reports that it is missing
        from huggingface_hub.constants import HF_HUB_CACHE

        found.append(FolderUse("models of the hub", Path(HF_HUB_CACHE), "name another in HF_HOME", needed=False))
    return found


def disk(machine: Machine) -> Iterator[Finding]:
    """Report whether each folder is writable and has free space; folders on one disk share a line if all is well."""
    enough: dict[int, list[FolderUse]] = {}
    for place in places(machine):
        level = problem if place.needed else warning
        try:
            _written_at(place.existing)
        except OSError as error:
            words = f"{place.what}: {place.folder} cannot be written ({error.strerror})"
            yield level(words, f"make it writable or free space, or {place.fix}")
            continue
        free = shutil.disk_usage(place.existing).free
        if free < LITTLE_DISK:
            less = free < LEAST_DISK
            words = f"{place.what}: {free / GIB:.2f} GiB free in {place.existing}"
            yield (level if less else warning)(words, f"free space, or {place.fix}")
        else:
            enough.setdefault(os.stat(place.existing).st_dev, []).append(place)
    for same in enough.values():
        free = shutil.disk_usage(same[0].existing).free
        yield ok(f"{free / GIB:,.0f} GiB free for {', '.join(place.what for place in same)}")


def clock(machine: Machine) -> Iterator[Finding]:
    """Report whether each disk's clock agrees with this machine's: both decide how old locks and cache entries seem."""
    seen: dict[int, FolderUse] = {}
    for place in places(machine):
        seen.setdefault(os.stat(place.existing).st_dev, place)
    apart = []
    for place in seen.values():
        try:
            seconds = _written_at(place.existing) - time.time()
        except OSError:
            continue  # `disk` reports it
        if abs(seconds) > CLOCK_SECONDS:
            side = "ahead of" if seconds > 0 else "behind"
            words = f"the clock of {place.existing} ({place.what}) is {abs(seconds):,.0f} s {side} this machine's"
            apart.append(warning(words, "set both by NTP (timedatectl shows this one); locks and caches go by age"))
    yield from apart or [ok("each disk's clock agrees with this machine's")]


def shared_operators(machine: Machine) -> Iterator[Finding]:
    """Warn of a shared folder: operators are compiled for this CPU, and may be illegal instructions on another CPU."""
    place = next(place for place in places(machine) if place.what == "DeepSpeed's operators")
    if not is_local(place.existing):
        words = f"{place.folder} may be shared between machines: operators are compiled for this one's CPU"
        yield warning(words, "where the CPUs differ, set TORCH_EXTENSIONS_DIR to a folder of each machine's own")


def _written_at(folder: Path) -> float:
    """Write a file and return its modification time by the disk's clock, in seconds since 1970.

    Raises:
        OSError: the folder cannot be written, or the disk or a quota is full.
    """
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0" * _TRIAL_BYTES)
        file.flush()
        os.fsync(file.fileno())  # a network file system may write the data, and set the time, only now
        return os.fstat(file.fileno()).st_mtime
