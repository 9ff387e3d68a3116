"""Checks the host: cores and who uses them, memory, limits, variables of a launcher, and the folders of runs."""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from accel_sft.io import cache
from accel_sft.launch import host_memory
from accel_sft.launch.deepspeed_ops import is_local
from accel_sft.launch.environment import prepare_environment, usable_cores
from accel_sft.launch.machine_state import CoreClock
from accel_sft.launch.precision import cpu_name
from accel_sft.tools.doctor.machine import Finding, Machine, ok, problem, warning
from accel_sft.tracking.disturbed import LOST

SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
LEAST_MEMORY, LITTLE_MEMORY = 1 * GIB, 3 * GIB
"""Free bytes below which memory is a problem, or a warning. What two ranks of the smallest model take lies between."""
LITTLE_SHARED_MEMORY = 1 * GIB
"""Free bytes of /dev/shm that NCCL's documentation recommends for ranks on several GPUs."""
LEAST_DISK, LITTLE_DISK = GIB // 4, 5 * GIB
"""Free bytes below which a folder is a problem (it could not hold a run of the smallest model) or a warning.

For comparison: a checkpoint of a 0.5B model takes 7 GiB.
"""
FEW_FILES = 1024
"""Limit of open files below which there is a warning."""
WATCHED_SECONDS = 1.0
"""How long the cores are watched."""
_TRIAL_BYTES = 1 << 20
"""Size of the file that is written as a trial."""


def environment(machine: Machine) -> Iterator[Finding]:
    """Set the environment variables that a launch sets, for later checks and the processes that they start."""
    prepare_environment()  # raises UserError for ranks without a launcher
    yield from ()


def cores(machine: Machine) -> Iterator[Finding]:
    count, usable = os.cpu_count() or 1, usable_cores()
    less = f" of {count} logical" if usable < count else ""
    yield ok(f"{usable} usable{less} ({cpu_name()})")


def other_work(machine: Machine) -> Iterator[Finding]:
    """Watch what other processes, and a hypervisor's other machines, take of the cores; nothing without /proc/stat."""
    import psutil

    def used() -> dict[str, float]:
        """CPU seconds so far of each process that may be read, by its name and number."""
        processes = [process.info for process in psutil.process_iter(["name", "pid", "cpu_times"])]
        return {
            f"{info['name']} ({info['pid']})": sum(info["cpu_times"][:2]) for info in processes if info["cpu_times"]
        }

    clock, before, began = CoreClock(), used(), time.process_time()
    time.sleep(WATCHED_SECONDS)
    busy, idle, stolen, _ = clock.since()
    if math.isnan(busy):
        return
    shares = {name: (seconds - before.get(name, seconds)) / WATCHED_SECONDS for name, seconds in used().items()}
    count = busy + idle + stolen
    others = max(busy - (time.process_time() - began) / WATCHED_SECONDS, 0.0)
    words = f"other processes take {others:.1f} of {count:.0f} cores, load {os.getloadavg()[0]:.1f}"
    if others >= LOST * count:
        most = sorted(shares, key=lambda name: -shares[name])[:3]
        named = ", ".join(f"{name} {shares[name]:.1f}" for name in most if shares[name] >= LOST)
        fix = "end them, or measure later: measurements are slower beside them"
        yield warning(f"{words}; most of them: {named}" if named else words, fix)
    else:
        yield ok(words)
    if stolen >= LOST * max(busy + stolen, 1.0):
        what = f"a hypervisor takes {stolen:.1f} of {count:.0f} cores for other machines (steal)"
        yield warning(what, "ask for cores of your own, or for another host")


def memory(machine: Machine) -> Iterator[Finding]:
    free, words = host_memory.free_bytes(), host_memory.describe()
    fix = "free memory (top shows whose it is), raise the container's limit, or train on a larger machine"
    if free < LEAST_MEMORY:
        yield problem(f"{words}: too little for two ranks of any model", fix)
    elif free < LITTLE_MEMORY:
        yield warning(f"{words}: enough for the smallest models only", fix)
    else:
        yield ok(words)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Report whether /dev/shm is large enough: NCCL exchanges data between ranks through it. CPUs do not need it."""
    if not SHARED_MEMORY.is_dir():
        words = f"there is no {SHARED_MEMORY}, which NCCL needs between GPUs"
        yield warning(words, f"mount a tmpfs on {SHARED_MEMORY}") if machine.devices > 1 else ok(words)
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    words = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB of shared memory free"
    if usage.free < LITTLE_SHARED_MEMORY and machine.devices > 1:
        fix = "start the container with --shm-size=1g or --ipc=host; or remove what ended programs left there"
        yield warning(f"{words}: NCCL fails between GPUs where it is full", fix)
    else:
        yield ok(words)


def open_files(machine: Machine) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = soft == resource.RLIM_INFINITY
    words = "no limit" if unlimited else f"{soft:,} at most for a process"
    if unlimited or soft >= FEW_FILES:
        yield ok(words)
        return
    most = FEW_FILES if hard == resource.RLIM_INFINITY else min(4 * FEW_FILES, hard)
    fix = f"ulimit -n {most}" if most >= FEW_FILES else f"have the hard limit ({hard}) raised in limits.conf"
    yield warning(f"{words}: a rank with a tracker and many data files needs more", fix)


def _folders(runs: Path) -> Iterator[tuple[str, Path, str, bool]]:
    """What runs write, the folder, how the user names another one, and whether training fails without it."""
    yield "runs", runs, "--output-dir", True
    yield "temporary files", Path(tempfile.gettempdir()), "TMPDIR", True
    yield "DeepSpeed's operators", _operators_folder(), "TORCH_EXTENSIONS_DIR", True
    yield "token cache", cache.folder(), "ACCEL_SFT_CACHE", False
    if find_spec("huggingface_hub"):  # another check reports that it is missing
        from huggingface_hub.constants import HF_HUB_CACHE

        yield "models of the hub", Path(HF_HUB_CACHE), "HF_HOME", False


def _operators_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path(caches, "torch_extensions"))


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def disk(machine: Machine) -> Iterator[Finding]:
    """Report whether each folder is writable and has free space; folders on one disk share a line if all is well."""
    enough: dict[int, list[str]] = {}
    free_gib = {}
    for what, folder, setting, needed in _folders(machine.runs):
        level, place, fix = problem if needed else warning, _existing(folder), f"or name another with {setting}"
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0" * _TRIAL_BYTES)
                file.flush()
                os.fsync(file.fileno())  # a network file system may write the data only now
        except OSError as error:
            yield level(
                f"{what}: {folder} cannot be written ({error.strerror})", f"make it writable, free space, {fix}"
            )
            continue
        free, device = shutil.disk_usage(place).free, os.stat(place).st_dev
        if free < LITTLE_DISK:
            words = f"{what}: {free / GIB:.2f} GiB free in {place}"
            yield (level if free < LEAST_DISK else warning)(words, f"free space, {fix}")
        else:
            enough.setdefault(device, []).append(what)
            free_gib[device] = free / GIB
    for device, named in enough.items():
        yield ok(f"{free_gib[device]:,.0f} GiB free for {', '.join(named)}")


def shared_operators(machine: Machine) -> Iterator[Finding]:
    """Warn of a shared folder: operators are compiled for this CPU, and may be illegal instructions on another CPU."""
    folder = _operators_folder()
    if not is_local(_existing(folder)):
        words = f"{folder} may be shared between machines: operators are compiled for this one's CPU"
        yield warning(words, "where the CPUs differ, set TORCH_EXTENSIONS_DIR to a folder of each machine's own")
