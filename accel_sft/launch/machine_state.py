"""Describes this machine and its software, and reads what slows it down: other processes on its cores and GPUs, steal,
CPU quotas and throttled clocks. NaN means unknown. No torch."""

import contextlib
import math
import os
import platform
import re
import sys
import time
from typing import Any, NamedTuple

import psutil

from accel_sft.launch import host_memory
from accel_sft.launch.environment import usable_cores
from accel_sft.launch.precision import cpu_flags, cpu_name
from accel_sft.launch.recordable import recordable, versions

_VARIABLES = re.compile(r"(ACCELERATE|ACCEL_SFT|CUDA|DS|GLOO|HF|MKL|NCCL|OMP|OPENBLAS|PYTORCH|TORCH|TRITON)_")
"""Prefixes of the environment variables that may change what a launch does."""
_CAPABILITY = 8
"""Major compute capability from which NVIDIA's GPUs compute bf16: Ampere."""


def environment() -> dict[str, Any]:
    """Versions, platform, cores, host memory, devices and environment variables; secrets are left out."""
    driver, gpus = nvidia_gpus()
    return {
        "versions": versions(),
        "python": sys.executable,
        "platform": platform.platform(),
        "processor": cpu_name(),
        "cores": usable_cores(),
        "host_memory_gib": psutil.virtual_memory().total / 2**30,
        "driver": driver,
        "devices": gpus,
        "variables": {
            key: recordable(value, key) for key, value in sorted(os.environ.items()) if _VARIABLES.match(key)
        },
    }


def nvidia_gpus() -> tuple[str | None, list[dict[str, Any]]]:
    """The NVIDIA driver's version, and name, memory and major compute capability of each GPU that CUDA_VISIBLE_DEVICES
    shows; None and [] without a driver. The memory is None for a GPU that shares the host's (GB10, Jetson)."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return None, []

    def gpu(index: int) -> dict[str, Any]:
        handle, memory_gib = pynvml.nvmlDeviceGetHandleByIndex(index), None
        with contextlib.suppress(pynvml.NVMLError_NotSupported):
            memory_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
        capability, _ = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        return {"name": pynvml.nvmlDeviceGetName(handle), "memory_gib": memory_gib, "capability": capability}

    try:
        driver, gpus = pynvml.nvmlSystemGetDriverVersion(), [*map(gpu, range(pynvml.nvmlDeviceGetCount()))]
    finally:
        pynvml.nvmlShutdown()
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(len(gpus))))).split(",")
    if all(name.strip().isdecimal() or name in ("", "-1") for name in named):
        return driver, [gpus[int(name)] for name in named if name.strip().isdecimal() and int(name) < len(gpus)]
    return driver, gpus[: len(named)]  # named by UUID


def this_machine_computes_bf16(*, with_gpus: bool = True) -> bool:
    """Whether ranks started here have bf16 instructions: on NVIDIA GPUs if there are any, else on the CPU."""
    gpus = nvidia_gpus()[1] if with_gpus else []
    return all(gpu["capability"] >= _CAPABILITY for gpu in gpus) if gpus else bool(cpu_flags())


class Cores(NamedTuple):
    """How many of this process's cores were busy, idle, stolen or held, on average since the last call."""

    busy: float  # cores that ran processes of any user; interrupts do not count
    idle: float
    stolen: float  # cores whose processes waited while a hypervisor ran other machines (steal)
    held: float  # cores whose processes waited because a container's CPU quota was used up


class CoreClock:
    """Measures `Cores` from one call to the next."""

    def __init__(self) -> None:
        self._before = _core_seconds()

    def since(self) -> Cores:
        """The cores' use since the last call; all NaN without Linux's /proc/stat, or before its next tick."""
        now = _core_seconds()
        wall, *parts, held = (new - old for new, old in zip(now, self._before, strict=True))
        if not sum(parts) > 0:  # NaN, too
            return Cores(math.nan, math.nan, math.nan, math.nan)
        self._before = now
        cores_a_tick = len(os.sched_getaffinity(0)) / sum(parts)
        busy, idle, stolen = (part * cores_a_tick for part in parts)
        return Cores(busy, idle, stolen, held / wall)


def _core_seconds() -> list[float]:
    """The time, and the seconds that this process's cores were busy, idle, stolen and held; NaN if unknown."""
    try:
        lines = (host_memory.SYSTEM / "proc/stat").read_text().splitlines()
    except OSError:
        return [math.nan] * 5
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    counts = [line.split() for line in lines if line.startswith("cpu")]
    ticks = [[int(count) for count in counted[1:9]] for counted in counts if counted[0] in mine]
    if not ticks:  # a container, where the file may number the cores differently
        return [math.nan] * 5
    user, nice, system, idle, waiting, _, _, stolen = (sum(column) for column in zip(*ticks, strict=True))
    stats = [folder / "cpu.stat" for folder in host_memory.cgroups("cpu")]  # in versions 2 and 1 of cgroups:
    held = (
        host_memory.field(file, "throttled_usec") / 1e6 + host_memory.field(file, "throttled_time") / 1e9
        for file in stats
    )
    counted = (count / os.sysconf("SC_CLK_TCK") for count in (user + nice + system, idle + waiting, stolen))
    return [time.monotonic(), *counted, max(held, default=0.0)]


_POWER_CAP = 0x4
REASONS = {_POWER_CAP: "power cap", 0x12: "clocks set by a person", 0x60: "heat", 0x88: "slowdown by hardware"}
"""Why a GPU's clock is low, by bits of nvmlClocksEventReason* in nvml.h."""
_FULL_POWER, _FULL_CLOCK = 0.98, 0.9
"""Shares of a GPU's default power limit and of its highest clock. A GPU with at least these shares does not count as
slowed down: limits are rounded to watts, and even on a quiet machine the clock varies by 10% between measurements."""


class GpuState(NamedTuple):
    """The clock of a GPU's multiprocessors, its share of the highest clock, and the REASONS bits for a lower clock."""

    mhz: float = math.nan
    clock_share: float = math.nan
    reasons: float = math.nan


def gpu_state(nvml: Any, handle: Any) -> GpuState:
    """Read a GPU's state with the module `pynvml`; all NaN if the driver does not report it, such as for a MIG slice. A
    power cap at the card's default limit does not count: at full load most GPUs always reach it."""
    try:
        clocks = nvml.nvmlDeviceGetClockInfo, nvml.nvmlDeviceGetMaxClockInfo
        mhz, highest = (clock(handle, nvml.NVML_CLOCK_SM) for clock in clocks)
        reasons = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle) if mhz < _FULL_CLOCK * highest else 0
        if reasons & _POWER_CAP:
            limit = nvml.nvmlDeviceGetPowerManagementLimit(handle)
            usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
            reasons -= _POWER_CAP if limit >= _FULL_POWER * usual else 0
    except nvml.NVMLError:
        return GpuState()
    return GpuState(mhz, mhz / highest, reasons & sum(REASONS)) if highest else GpuState()


def others_gib(nvml: Any, handle: Any) -> float:
    """Memory that processes of other launches use on a GPU. NaN if the driver's list lacks this process, for example in
    a container: the owners of the listed processes are then unknown."""
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return math.nan
    used = {process.pid: process.usedGpuMemory or 0 for process in processes}
    if os.getpid() not in used:
        return math.nan
    ours = {os.getpid(), os.getppid()} if int(os.environ.get("WORLD_SIZE", "1")) > 1 else {os.getpid()}
    for pid in [*used]:
        with contextlib.suppress(psutil.Error):
            if ours & {pid, *(process.pid for process in psutil.Process(pid).parents())}:
                del used[pid]
    return sum(used.values()) / 2**30


def slowed_by(reasons: float) -> str:
    """`GpuState.reasons` in words; "" if nothing slows the GPU down, or if the reasons are unknown."""
    return "" if math.isnan(reasons) else ", ".join(word for bits, word in REASONS.items() if int(reasons) & bits)


def open_gpu(uuid: str) -> tuple[Any, Any]:
    """Return the module `pynvml`, and its handle of the GPU with torch's UUID. (NVML's indices count hidden GPUs.)"""
    import pynvml

    pynvml.nvmlInit()
    name = uuid.removeprefix("GPU-").removeprefix("MIG-")
    try:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{name}")
    except pynvml.NVMLError:
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{name}")
