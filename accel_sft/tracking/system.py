"""Measures this process's CPU, host memory and GPU. A reading that is unavailable is NaN or None."""

import contextlib
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from accel_sft.launch.machine_state import CoreClock, GpuState, cpu_clock, gpu_state, open_gpu, others_gib

GIB = 2**30

SYSTEM_FIELDS = (
    "sample",  # number of the sample: the same number means the same readings
    "cpu_percent",  # of one core, as in top: 200 is two busy cores
    "process_memory_gib",  # resident memory of this rank's process
    "host_memory_gib",  # in use on the whole machine
    "gpu_percent",  # share of the time in which a kernel ran
    "gpu_memory_gib",  # in use on the whole device, by every process
    "gpu_energy_joules",  # taken by the whole device since this process began to read it
    "forward_seconds",  # that this rank's batches and forwards took since its start; NaN where they wait for others
    "busy_cores",  # that ran any process; this and the next three are read on the first rank of a machine only
    "idle_cores",  # of those that this process may use
    "stolen_cores",  # by a hypervisor
    "held_cores",  # by a container's CPU quota
    "gpu_clock_mhz",
    "gpu_clock_share",  # of its highest
    "gpu_slowed_by",  # bits of `machine_state.GpuState.reasons`
    "cpu_clock_share",  # of the highest clock of the core that the process runs on
    "gpu_others_gib",  # memory of others' processes
)
"""Meaning of each place in `SystemSampler.sample()`."""
ENERGY, FORWARDS = SYSTEM_FIELDS.index("gpu_energy_joules"), SYSTEM_FIELDS.index("forward_seconds")
_SLOW_EVERY = 10
"""Samples from one reading of the CPU's clock and the GPU's processes to the next: each may take ten milliseconds."""


class SystemSampler:
    """Readings of one rank's process and device, taken at most once a second, so that a call in every step is cheap."""

    def __init__(self, device: torch.device, *, seconds_between: float = 1.0) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only starts the interval
        self._seconds_between = seconds_between
        self._next = 0.0
        self._latest = [0.0] + [math.nan] * (len(SYSTEM_FIELDS) - 1)
        self._nvml: Any = None
        self._seen, self._joules_before = 0, 0.0
        self.forward_seconds = 0.0  # the tracker adds to it
        self._cores = CoreClock() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        self._slow = [math.nan, math.nan]
        self.problem: str | None = None
        """Why there are no GPU readings (any more) although there is a GPU."""
        if device.type == "cuda":
            self._open_nvml(device)

    def _open_nvml(self, device: torch.device) -> None:
        try:
            self._nvml = open_gpu(str(torch.cuda.get_device_properties(device).uuid))
            self._joules_before = self._joules()
        except Exception as error:  # noqa: BLE001 - a driver without NVML must not stop a training run
            self.problem = f"no GPU curves: NVML says {error}"

    def sample(self) -> list[float]:
        """The latest readings in the order of SYSTEM_FIELDS; the same list again within `seconds_between`."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._seconds_between
            self._latest = [
                self._latest[0] + 1,
                self._process.cpu_percent(None),
                self._process.memory_info().rss / GIB,
                psutil.virtual_memory().used / GIB,
                *self._gpu(),
                self.forward_seconds,
                *self._state(),
            ]
        return self._latest

    def _state(self) -> list[float]:
        """What may slow the machine down, from `busy_cores` on."""
        cores: Sequence[float] = self._cores.since() if self._cores else [math.nan] * 4
        if self._latest[0] % _SLOW_EVERY == 0:
            now, highest, _ = cpu_clock()
            self._slow = [now / highest, others_gib(*self._nvml) if self._nvml else math.nan]
        gpu = gpu_state(*self._nvml) if self._nvml else GpuState()
        return [*cores, gpu.mhz, gpu.mhz / gpu.highest_mhz, gpu.reasons, *self._slow]

    def _gpu(self) -> tuple[float, float, float]:
        if self._nvml is None:
            return math.nan, math.nan, math.nan
        pynvml, handle = self._nvml
        percent = memory_gib = math.nan
        try:
            with contextlib.suppress(pynvml.NVMLError_NotSupported):  # the memory is the host's (GB10, Jetson)
                memory_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
        except pynvml.NVMLError as error:  # the driver was updated below the run, say; it is not asked again
            self._nvml, self.problem = None, f"no GPU curves from here on: NVML says {error}"
            return math.nan, math.nan, math.nan
        with contextlib.suppress(pynvml.NVMLError):  # a MIG slice has memory but no utilisation
            percent = self._percent(pynvml, handle)
        return percent, memory_gib, self._joules() - self._joules_before

    def _percent(self, pynvml: Any, handle: Any) -> float:
        """Return the mean GPU use since the last call. Calls come at one point of each step, whose use says little."""
        with contextlib.suppress(pynvml.NVMLError):  # where the driver keeps no samples, or has no new one
            _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen)
            new = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp > self._seen]
            if new:
                self._seen = max(sample.timeStamp for sample in samples)
                return sum(new) / len(new)
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)

    def _joules(self) -> float:
        """Joules that the device took since its driver was loaded; NaN if it does not count (before Volta, MIG)."""
        pynvml, handle = self._nvml
        try:
            return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
        except pynvml.NVMLError:
            return math.nan


class Usage:
    """Mean and peak of each rank's readings over a run's training steps.

    A rank's first reading counts only while it is the only one: its CPU use is that of start-up and evaluation.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, float] = {}  # by rank, the number of its latest sample
        self._joules: dict[int, float] = {}
        self._rows: dict[int, dict[str, Any]] = {}

    def add(self, rank: int, sample: Sequence[float]) -> bool:
        """Count a rank's reading, in the order of SYSTEM_FIELDS; returns False, and does nothing, if it is not new."""
        number, before = sample[0], self._numbers.get(rank)
        if before == number:
            return False
        self._numbers[rank] = number
        if not math.isnan(sample[ENERGY]):
            self._joules[rank] = sample[ENERGY]
        row = self._rows.get(rank)
        if row is None or (row["samples"] == 1 and row["first"]):
            row = {"rank": rank, "samples": 0, "first": row is None, "mean": {}, "peak": {}, "read": Counter()}
            self._rows[rank] = row
        row["samples"] += 1
        for field, value in zip(SYSTEM_FIELDS[1:ENERGY], sample[1:ENERGY], strict=True):  # the rest only grows
            if not math.isnan(value):
                row["read"][field] += 1
                mean = row["mean"].get(field, 0.0)
                row["mean"][field] = mean + (value - mean) / row["read"][field]
                row["peak"][field] = max(value, row["peak"].get(field, value))
        return True

    def by_rank(self) -> list[dict[str, Any]]:
        """`rank`, number of `samples`, and `mean` and `peak` of every field of SYSTEM_FIELDS that could be read, but of
        energy and those behind it."""
        kept = ("rank", "samples", "mean", "peak")
        return [{key: row[key] for key in kept} for _, row in sorted(self._rows.items())]

    def energy(self) -> tuple[float, int]:
        """Joules that all ranks' GPUs took until their latest readings, and how many GPUs count them."""
        return sum(self._joules.values()), len(self._joules)


def seconds_since_start() -> float:
    """Age of this process, interpreter start and imports included."""
    stat = Path("/proc/self/stat")
    if stat.exists():  # psutil takes the time of boot from the wall clock, which may have been set since, by seconds
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])  # field 22, starttime, see proc(5)
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - psutil.Process().create_time()


def device_memory_gib(device: torch.device) -> dict[str, float | None]:
    """Return torch's memory on `device`: `allocated`, `peak` (since the last reset), `reserved`; None without CUDA."""
    if device.type != "cuda":
        return dict.fromkeys(("allocated", "peak", "reserved"))
    return {
        "allocated": torch.cuda.memory_allocated(device) / GIB,
        "peak": torch.cuda.max_memory_allocated(device) / GIB,
        "reserved": torch.cuda.memory_reserved(device) / GIB,
    }


def host_memory_gib() -> dict[str, float]:
    """Resident memory of this process: `now` and its `peak` so far."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    peak = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
    if peak is None:  # not on Linux, where ru_maxrss starts from the peak of the launcher, which forked this process
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"now": psutil.Process().memory_info().rss / GIB, "peak": peak / GIB}


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """This process's largest memory since its start or the last reset, on the host and on `device` (if CUDA's)."""
    device_peak = device_memory_gib(device)["peak"]
    on_device = {} if device_peak is None else {"peak_device_memory_gib": device_peak}
    return {**on_device, "peak_host_memory_gib": host_memory_gib()["peak"]}


def reset_peak_memory(device: torch.device) -> None:
    """Restart the peaks, so that loading and generating each have their own; for host memory on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # not on Linux, or forbidden in a container: the peak then counts from the start
        Path("/proc/self/clear_refs").write_text("5")  # 5: VmHWM, see proc(5)
