"""Checks this machine: cores, memory, limits, folders of runs, what is installed, the GPUs and their driver."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import accel_sft
from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.io import cache
from accel_sft.launch import host_memory
from accel_sft.launch.deepspeed_ops import is_local
from accel_sft.launch.environment import prepare_environment, usable_cores
from accel_sft.launch.machine_state import CoreClock
from accel_sft.launch.precision import cpu_flags, cpu_name
from accel_sft.tools.doctor.machine import LIBRARIES, Finding, Machine, ask, ok, problem, script, warning
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
DISTRIBUTION = "accel-sft"
NETWORK_SECONDS = 15.0
"""Time limit for the hub's answer."""
USED = 0.1
"""Share of a GPU's memory that may be in use already without a warning."""
SLOW, FAST = 0.95, 1.5
"""Speeds of bf16, as multiples of float32's, below which there is a warning (SLOW) or only a remark (FAST)."""
_SLOW_LINK = 0.5
"""Share of what its link could carry below which copies from pinned memory are slow; 0.8 to 0.9 is usual."""


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
        readable = [p.info for p in psutil.process_iter(["name", "pid", "cpu_times"]) if p.info["cpu_times"]]
        return {f"{info['name']} ({info['pid']})": sum(info["cpu_times"][:2]) for info in readable}

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
            words = f"{what}: {folder} cannot be written ({error.strerror})"
            yield level(words, f"make it writable, free space, {fix}")
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


def versions(machine: Machine) -> Iterator[Finding]:
    """Compare installed versions with the bounds in this package's metadata."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        what = "accel-sft is not installed, only imported: the versions of its libraries were not checked"
        yield warning(what, "bash setup.sh in the checkout installs all")
        return
    fitting = {}
    for requirement in map(Requirement, required):
        name, fix = requirement.name, f'pip install "{requirement}"'
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(f"{name} is not installed", fix)
            continue
        broken = [bound for bound in requirement.specifier if not bound.contains(version, prereleases=True)]
        if not broken:
            fitting[name] = version
        elif all(bound.operator in ("<", "<=") for bound in broken):
            yield warning(f"{name} {version} is newer than what accel_sft was tested with ({broken[0]})", fix)
        else:
            what = f"{name} {version}: accel_sft {accel_sft.__version__} needs {requirement.specifier}"
            yield problem(what, fix)
    if fitting:
        named = ", ".join(f"{name} {fitting[name]}" for name in LIBRARIES if name in fitting)
        yield ok(f"{len(fitting)} libraries within the bounds: {named}")


def imports(machine: Machine) -> Iterator[Finding]:
    """Report whether the libraries can be imported: even an installed one may lack a system library, or crash."""
    facts = machine.torch
    libraries = LIBRARIES[:-1] if sys.platform == "darwin" else LIBRARIES  # on macOS DeepSpeed is not installed
    for name in libraries:
        if failure := facts.imports.get(name):
            fix = f'{sys.executable} -c "import {name}" shows all of it; then install it again'
            yield problem(f"{name} cannot be imported: {failure}", fix)
    if facts.fault:
        fix = "the same step in a Python of your own shows more: the driver, or a build for another CPU or system"
        yield problem(f"torch and DeepSpeed could not be asked: {facts.fault}", fix)
    elif not any(map(facts.failure, libraries)):
        yield ok(f"{', '.join(libraries)} can be imported")


def tasks(machine: Machine) -> Iterator[Finding]:
    usable = []
    for plugin in registry.plugins():
        try:
            registry.load_plugin(plugin)
            usable.append(plugin.name)
        except UserError as error:
            for line in error.problems:
                yield warning(line, "fix or uninstall its package; other tasks run")
    if usable:
        yield ok(", ".join(usable))
    else:
        yield problem("no task can be used", "accel-sft tasks says why; accel-sft new-task NAME writes one")


def hub(machine: Machine) -> Iterator[Finding]:
    """Report whether models can be downloaded; only with --network, since the request leaves this machine."""
    if not machine.network:
        return
    answer = ask(script("hub"), NETWORK_SECONDS)
    if answer.status == 0:
        yield ok("the hub answers")
        return
    why = f"no answer within {NETWORK_SECONDS:.0f} s" if answer.status is None else answer.reason("no reason given")
    fix = "see HTTPS_PROXY and HF_ENDPOINT; --model takes a folder, and tiny downloads nothing"
    yield warning(f"the hub cannot be reached: {why}", fix)


def gpus(machine: Machine) -> Iterator[Finding]:
    """Report the GPUs that the driver and torch see, those already in use, and those that cannot compute."""
    facts = machine.torch
    if facts.driver_failure:
        fix = "install the NVIDIA driver again, and restart the machine"
        if "mismatch" in facts.driver_failure.lower():
            fix = "restart the machine: the driver's module and its library differ"
        level = warning if machine.devices else problem
        yield level(f"the NVIDIA driver does not answer: {facts.driver_failure}", fix)
    rows = facts.driver_gpus.values()
    if rows:
        names = (row["name"] + (f" ({row['total'] / GIB:.0f} GiB)" if "total" in row else "") for row in rows)
        kinds = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
        seen = f", of which torch sees {machine.devices}" if 0 < machine.devices != len(rows) else ""
        yield ok(f"{kinds}{seen}; driver {facts.driver}")
    elif machine.devices:
        kinds = ", ".join(dict.fromkeys(facts.device_names or ["an accelerator"]))
        yield ok(f"{machine.devices} x {kinds}")
    elif not facts.driver_failure:
        yield ok("none; training runs on the CPU")
    for index, row in facts.driver_gpus.items():
        used, busy = row.get("used", 0), row.get("busy", 0)
        if used > USED * row.get("total", math.inf) or busy >= 100 * LOST:
            what = f"GPU {index} is in use: {busy}% of the time, {used / GIB:.1f} GiB"
            yield warning(what, "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses others")
    if rows and not machine.devices and _hidden():
        yield ok("hidden from torch by CUDA_VISIBLE_DEVICES: training runs on the CPU")
    for index, failure in facts.device_failures.items():
        fix = "update the driver, or install a build of torch for this kind of GPU; CUDA_VISIBLE_DEVICES leaves it out"
        yield problem(f"GPU {index} cannot compute: {failure}", fix)
        machine.unusable.setdefault("devices", f"GPU {index} cannot compute")


def _hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def copies(machine: Machine) -> Iterator[Finding]:
    """Report each GPU's bandwidth to the host's memory, on which loading and offload depend."""
    for index, speeds in machine.torch.copies.items():
        ways = {way: speed for way, speed in speeds.items() if way != "link"}
        words = ", ".join(f"{speed:.3g} GB/s {way} memory" for way, speed in ways.items())
        yield ok(f"GPU {index}: {words or 'not measured'}")
        slowest = min((speed for way, speed in ways.items() if "pinned" in way), default=math.inf)
        if slowest < _SLOW_LINK * speeds.get("link", 0.0):
            what = f"GPU {index} copies {slowest:.1f} GB/s of {speeds['link']:.0f} that its link could carry"
            fix = "look for other work on host memory, and at slot and BIOS"
            yield warning(what, f"{fix}; numactl keeps a process to the GPU's socket")


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
    words = f"torch {facts.version} for CUDA {facts.cuda}, the driver runs up to {major}.{minor}"
    if 0 < major < int(facts.cuda.split(".")[0]):
        fix = "update the driver, or install torch for the driver's CUDA: bash setup.sh in the checkout"
        yield problem(words, fix)
    elif not machine.devices:
        complaint = facts.cuda_complaint or facts.fault or "it does not say why"
        yield problem(f"torch sees no GPU: {complaint}", "update the driver, and restart the machine")
    else:
        yield ok(words)
    if machine.devices and (nvcc := _nvcc()) and nvcc.split(".")[0] != facts.cuda.split(".")[0]:
        what = f"nvcc is of CUDA {nvcc}, torch of {facts.cuda}: what is compiled for GPUs may fail"
        yield warning(what, f"install the toolkit of CUDA {facts.cuda} and set CUDA_HOME; only z3_nvme needs it")


def _nvcc() -> str:
    """The version of the CUDA toolkit's compiler; empty if there is none (the check of operators reports that)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    program = shutil.which(Path(home, "bin", "nvcc")) or shutil.which("nvcc")
    release = re.search(r"release ([\d.]+)", ask([program, "--version"], 30).out) if program else None
    return release[1] if release else ""


def bf16(machine: Machine) -> Iterator[Finding]:
    """Report whether launch files that name no precision compute in bf16 here, and the measured speed of bf16."""
    facts = machine.torch
    if facts.bf16_speedup is None:
        return
    cpu = f"{cpu_name()} with {', '.join(cpu_flags()) or 'no instructions for bf16'}"
    where = facts.device_names[0] if facts.device_names else cpu
    ratio = facts.bf16_speedup
    measured = f"{ratio:.1f} times as fast as float32" if ratio >= 1 else f"{1 / ratio:.1f} times slower than float32"
    words = f"{measured} (one product of matrices, measured; {where})"
    if not facts.bf16_native:
        instead = "launch files that name no precision compute in float32"
        if facts.device_names:
            yield warning(f"{where} has no bf16: {instead}", "--mixed_precision fp16 in front of -m is faster")
        else:
            yield ok(f"{instead}; bf16 would be emulated, {words}")
    elif ratio < SLOW:
        yield warning(words, "it saves memory, not time; for speed: --mixed_precision no in front of -m")
    else:
        yield ok(words if ratio >= FAST else f"{words}: it saves memory, hardly time")
