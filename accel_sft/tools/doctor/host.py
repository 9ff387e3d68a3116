"""Checks the host: cores, memory, shared memory, open files, and variables that a launcher left behind."""

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

from accel_sft.launch import host_memory
from accel_sft.launch.environment import prepare_environment, usable_cores
from accel_sft.launch.precision import cpu_name
from accel_sft.tools.doctor.check import Finding, ok, problem, warning
from accel_sft.tools.doctor.machine import Machine

SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
LEAST_MEMORY, LITTLE_MEMORY = 1 * GIB, 3 * GIB
"""Free bytes below which memory is a problem, or a warning. What two ranks of the smallest model take lies between."""
LITTLE_SHARED_MEMORY = 1 * GIB
"""Free bytes of /dev/shm that NCCL's documentation recommends for ranks on several GPUs."""
FEW_FILES = 1024
"""Limit of open files below which there is a warning."""


def environment(machine: Machine) -> Iterator[Finding]:
    """Sets the environment variables that a launch sets, for later checks and the processes that they start."""
    prepare_environment()  # raises UserError for ranks without a launcher
    yield from ()


def cores(machine: Machine) -> Iterator[Finding]:
    count, usable = os.cpu_count() or 1, usable_cores()
    less = f" of {count} logical" if usable < count else ""
    yield ok(f"{usable} usable{less} ({cpu_name()})")


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
