"""Checks this machine: cores, memory, folders for runs, installed libraries, the GPUs and their driver."""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import accel_sft
from accel_sft.io import cache
from accel_sft.launch import host_memory
from accel_sft.launch.environment import prepare_environment, usable_cores
from accel_sft.launch.precision import cpu_name
from accel_sft.tools.doctor.machine import LIBRARIES, Finding, Machine, ok, problem, warning
from accel_sft.tracking.disturbed import LOST

SHARED_MEMORY = Path("/dev/shm")
GIB = 2**30
LEAST_MEMORY, LITTLE_MEMORY = 1 * GIB, 3 * GIB
"""Free bytes below which memory is a problem, and below which it is a warning. Two ranks of the smallest model need
more than the first number."""
LITTLE_SHARED_MEMORY = 1 * GIB
"""Free bytes of /dev/shm that NCCL's documentation recommends for ranks on several GPUs."""
LEAST_DISK, LITTLE_DISK = GIB // 4, 5 * GIB
"""Free bytes below which a folder is a problem (no run of the smallest model fits), and below which a warning."""
_TRIAL_BYTES = 1 << 20
"""Size of the file that is written to test a folder."""
DISTRIBUTION = "accel-sft"
USED = 0.1
"""Share of a GPU's memory that may already be in use without a warning."""


def environment(machine: Machine) -> Iterator[Finding]:
    """Set the environment variables that a launch sets, for later checks and the processes that they start."""
    prepare_environment()  # raises UserError for ranks without a launcher
    yield from ()


def cores(machine: Machine) -> Iterator[Finding]:
    count, usable = os.cpu_count() or 1, usable_cores()
    less = f" of {count} logical" if usable < count else ""
    yield ok(f"{usable} usable{less} ({cpu_name()})")


def memory(machine: Machine) -> Iterator[Finding]:
    free, amount = host_memory.free_bytes(), host_memory.describe()
    fix = "free memory (top shows whose it is), raise the container's limit, or train on a larger machine"
    if free < LEAST_MEMORY:
        yield problem(f"{amount}: too little for two ranks of any model", fix)
    elif free < LITTLE_MEMORY:
        yield warning(f"{amount}: enough for the smallest models only", fix)
    else:
        yield ok(amount)


def shared_memory(machine: Machine) -> Iterator[Finding]:
    """Report whether /dev/shm is large enough: NCCL, which only GPUs use, exchanges data between ranks through it."""
    if not SHARED_MEMORY.is_dir():  # macOS
        return
    usage = shutil.disk_usage(SHARED_MEMORY)
    amount = f"{usage.free / GIB:.1f} of {usage.total / GIB:.1f} GiB of shared memory free"
    if usage.free < LITTLE_SHARED_MEMORY and machine.devices > 1:
        fix = "start the container with --shm-size=1g or --ipc=host, or remove files that ended programs left there"
        yield warning(f"{amount}: NCCL between GPUs fails if this fills up", fix)
    else:
        yield ok(amount)


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    folder = folder.absolute()
    return next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))


def disk(machine: Machine) -> Iterator[Finding]:
    """Report whether each folder is writable and has free space."""
    from huggingface_hub.constants import HF_HUB_CACHE

    for what, folder, setting, needed in (
        ("runs", machine.runs, "--output-dir", True),
        ("temporary files", Path(tempfile.gettempdir()), "TMPDIR", True),
        ("token cache", cache.folder(), "ACCEL_SFT_CACHE", False),
        ("models of the hub", Path(HF_HUB_CACHE), "HF_HOME", False),
    ):
        level, place = problem if needed else warning, _existing(folder)
        try:
            with tempfile.TemporaryFile(dir=place) as file:
                file.write(b"\0" * _TRIAL_BYTES)
                file.flush()
                os.fsync(file.fileno())  # a network file system may write the data only now
        except OSError as error:
            words = f"{what}: {folder} cannot be written ({error.strerror})"
            yield level(words, f"make the folder writable, or name another folder with {setting}")
            continue
        free = shutil.disk_usage(place).free
        words = f"{what}: {free / GIB:,.1f} GiB free in {place}"
        if free < LITTLE_DISK:
            yield (level if free < LEAST_DISK else warning)(words, f"free space, or name another folder with {setting}")
        else:
            yield ok(words)


def versions(machine: Machine) -> Iterator[Finding]:
    """Compare installed versions with the bounds in this package's metadata."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        what = "accel-sft is not installed, only imported: the versions of its libraries were not checked"
        yield warning(what, "run bash setup.sh in the checkout: it installs all libraries")
        return
    fitting = {}
    for requirement in map(Requirement, required):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        name, fix = requirement.name, f'pip install "{requirement}"'
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(f"{name} is not installed", fix)
            continue
        broken = {bound.operator for bound in requirement.specifier if not bound.contains(version, prereleases=True)}
        if broken:
            level = warning if broken <= {"<", "<="} else problem  # only newer than the tested versions
            yield level(f"{name} {version}: accel_sft {accel_sft.__version__} needs {requirement.specifier}", fix)
        else:
            fitting[name] = version
    if fitting:
        named = ", ".join(f"{name} {fitting[name]}" for name in LIBRARIES if name in fitting)
        yield ok(f"{len(fitting)} libraries within the bounds: {named}")


def imports(machine: Machine) -> Iterator[Finding]:
    """Report whether the libraries can be imported: even an installed one may lack a system library, or crash."""
    facts = machine.torch
    libraries = LIBRARIES[:-1] if sys.platform == "darwin" else LIBRARIES  # on macOS DeepSpeed is not installed
    for name in libraries:
        if failure := facts.imports.get(name):
            fix = f'{sys.executable} -c "import {name}" shows the whole error; then reinstall {name}'
            yield problem(f"{name} cannot be imported: {failure}", fix)
    if facts.fault:
        fix = "run this step in Python to see more; likely causes: the driver, or a build for another CPU or system"
        yield problem(f"torch and DeepSpeed could not be checked: {facts.fault}", fix)
    elif not any(map(facts.failure, libraries)):
        yield ok(f"{', '.join(libraries)} can be imported")


def gpus(machine: Machine) -> Iterator[Finding]:
    """Report the GPUs that the driver and torch see, which of them are already in use, and which cannot compute."""
    facts = machine.torch
    if facts.driver_failure:
        level = warning if machine.devices else problem
        fix = "restart the machine, or install the driver again"
        yield level(f"the NVIDIA driver does not answer: {facts.driver_failure}", fix)
    rows = facts.driver_gpus.values()
    names = [row["name"] + (f" ({row['total'] / GIB:.0f} GiB)" if "total" in row else "") for row in rows]
    names = names or facts.device_names or ["accelerator"] * machine.devices
    kinds = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    if names:
        hidden = " (CUDA_VISIBLE_DEVICES hides all)" if _hidden() else ""
        seen = f"; torch sees {machine.devices} of them{hidden}" if machine.devices != len(names) else ""
        yield ok(f"{kinds}{seen}" + (f"; driver {facts.driver}" if facts.driver else ""))
    elif not facts.driver_failure:
        yield ok("none; training runs on the CPU")
    for index, row in facts.driver_gpus.items():
        used, busy = row.get("used", 0), row.get("busy", 0)
        if used > USED * row.get("total", math.inf) or busy >= 100 * LOST:
            what = f"GPU {index} is in use: {busy}% of the time, {used / GIB:.1f} GiB"
            yield warning(what, "nvidia-smi shows by which process; CUDA_VISIBLE_DEVICES chooses other GPUs")
    for index, failure in facts.device_failures.items():
        fix = "update the driver, install a torch build for this GPU, or leave the GPU out with CUDA_VISIBLE_DEVICES"
        yield problem(f"GPU {index} cannot compute: {failure}", fix)
        machine.unusable.setdefault("devices", f"GPU {index} cannot compute")


def _hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def copies(machine: Machine) -> Iterator[Finding]:
    """Report each GPU's bandwidth to the host's memory, on which loading and offload depend."""
    for index, speeds in machine.torch.copies.items():
        words = ", ".join(f"{speed:.3g} GB/s {way} pinned memory" for way, speed in speeds.items())
        yield ok(f"GPU {index}: {words or 'not measured'}")


def cuda(machine: Machine) -> Iterator[Finding]:
    """Compare the driver's CUDA version with torch's: a driver runs its own major version and all older ones."""
    facts = machine.torch
    if not facts.driver_gpus or _hidden() or not facts.version:
        return
    if facts.cuda is None:
        if not machine.devices:
            what = f"torch {facts.version} is a build without CUDA: it uses none of the GPUs"
            yield problem(what, "install the CUDA build: bash setup.sh in the checkout, or see pytorch.org")
        return
    major, minor = facts.driver_cuda // 1000, facts.driver_cuda % 1000 // 10
    builds = f"torch {facts.version} is built for CUDA {facts.cuda}; the driver runs up to {major}.{minor}"
    if 0 < major < int(facts.cuda.split(".")[0]):
        fix = "update the driver, or install torch for the driver's CUDA: bash setup.sh in the checkout"
        yield problem(builds, fix)
    elif not machine.devices:
        complaint = facts.cuda_complaint or facts.fault or "torch gives no reason"
        yield problem(f"torch sees no GPU: {complaint}", "update the driver, and restart the machine")
    else:
        yield ok(builds)


def bf16(machine: Machine) -> Iterator[Finding]:
    """Report the precision that launch files without a precision get on this machine."""
    facts = machine.torch
    words = f"{facts.bf16_why}: launch files that name no precision compute in "
    if facts.device_names and not facts.bf16_native:
        yield warning(f"{words}float32", "--mixed_precision fp16 before -m is faster")
    elif facts.bf16_why:
        yield ok(f"{words}{'bf16' if facts.bf16_native else 'float32'}")
