"""Measures this process's CPU, host memory and GPU. A reading that is unavailable is NaN or None."""

import contextlib
import math
import os
import resource
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from accel_sft.launch.machine_state import CoreClock, GpuState, gpu_state, open_gpu, others_gib

GIB = 2**30


class Reading(NamedTuple):
    """One rank's measurements of its process, device and machine at one moment; NaN if unavailable."""

    sample: float = 0.0  # number of the sample: the same number means the same readings
    cpu_percent: float = math.nan  # percent of one core, as in top: 200 is two busy cores
    process_memory_gib: float = math.nan  # resident memory of this rank's process
    host_memory_gib: float = math.nan  # in use on the whole machine
    gpu_percent: float = math.nan  # share of the time in which a kernel ran
    gpu_memory_gib: float = math.nan  # in use on the whole device, by every process
    forward_seconds: float = math.nan  # of batches and forwards since the start; NaN if forwards wait for ranks
    busy_cores: float = math.nan  # cores that ran any process; this and the next three: only on a machine's first rank
    idle_cores: float = math.nan  # idle among the cores that this process may use
    stolen_cores: float = math.nan  # by a hypervisor
    held_cores: float = math.nan  # by a container's CPU quota
    gpu_clock_mhz: float = math.nan
    gpu_clock_share: float = math.nan  # of its highest
    gpu_slowed_by: float = math.nan  # bits of `machine_state.GpuState.reasons`
    gpu_others_gib: float = math.nan  # memory of other launches' processes


_AVERAGED = Reading._fields[1 : Reading._fields.index("forward_seconds")]
_SLOW_EVERY = 10
"""Number of samples per reading of the GPU's processes; such a reading may take ten milliseconds."""


class SystemSampler:
    """Readings of one rank's process and device, taken at most once a second, so that a call in every step is cheap.
    `log` gets a line if a GPU cannot be read."""

    def __init__(self, device: torch.device, log: Callable[[str], None], *, seconds_between: float = 1.0) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent(None)  # the first call only starts the interval
        self._seconds_between = seconds_between
        self._next = 0.0
        self._latest = Reading()
        self._nvml: Any = None
        self._seen = 0
        self.forward_seconds = 0.0  # the tracker adds to this
        self._cores = CoreClock() if os.environ.get("LOCAL_RANK", "0") == "0" else None
        self._others_gib = math.nan
        if device.type == "cuda":
            try:
                self._nvml = open_gpu(str(torch.cuda.get_device_properties(device).uuid))
            except Exception as error:  # noqa: BLE001 - a driver without NVML must not stop a training run
                log(f"GPU use is not measured: NVML reports {error}")

    def sample(self) -> Reading:
        """The latest reading; the same again within `seconds_between`."""
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self._seconds_between
            self._latest = Reading(
                self._latest.sample + 1,
                self._process.cpu_percent(None),
                self._process.memory_info().rss / GIB,
                psutil.virtual_memory().used / GIB,
                *self._gpu(),
                self.forward_seconds,
                *self._state(),
            )
        return self._latest

    def _state(self) -> list[float]:
        """What may slow the machine down: the fields of Reading from `busy_cores` on."""
        cores: Sequence[float] = self._cores.since() if self._cores else [math.nan] * 4
        if self._nvml and self._latest.sample % _SLOW_EVERY == 0:
            self._others_gib = others_gib(*self._nvml)
        gpu = gpu_state(*self._nvml) if self._nvml else GpuState()
        return [*cores, *gpu, self._others_gib]

    def _gpu(self) -> tuple[float, float]:
        percent = memory_gib = math.nan
        if self._nvml is not None:
            pynvml, handle = self._nvml
            with contextlib.suppress(pynvml.NVMLError):  # on GB10 and Jetson, the memory is the host's
                memory_gib = pynvml.nvmlDeviceGetMemoryInfo(handle).used / GIB
            with contextlib.suppress(pynvml.NVMLError):  # a MIG slice has memory but no utilization
                percent = self._percent(pynvml, handle)
        return percent, memory_gib

    def _percent(self, pynvml: Any, handle: Any) -> float:
        """Return the mean GPU use since the last call. One value says little: calls come at one point of a step."""
        with contextlib.suppress(pynvml.NVMLError):  # the driver may keep no samples, or have no new one
            _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, self._seen)
            new = [sample.sampleValue.uiVal for sample in samples if sample.timeStamp > self._seen]
            if new:
                self._seen = max(sample.timeStamp for sample in samples)
                return sum(new) / len(new)
        return float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu)


class NewReading(NamedTuple):
    """A rank's newest reading and the reading before it; None if there is none, or if a pause lies in between."""

    now: Reading
    before: Reading | None


class Readings:
    """Picks out each rank's new readings."""

    def __init__(self) -> None:
        self._latest: dict[int, Reading] = {}
        self._paused: set[int] = set()  # ranks whose next reading covers a pause

    def new(self, system: Sequence[Reading], paused: bool) -> dict[int, NewReading]:
        """The readings of this step that are new, by rank; `paused`: an evaluation or a checkpoint came before it."""
        self._paused.update(range(len(system)) if paused else ())
        new = {}
        for rank, now in enumerate(system):
            before = self._latest.get(rank)
            if before is None or before.sample != now.sample:
                new[rank] = NewReading(now, None if rank in self._paused else before)
                self._latest[rank] = now
                self._paused.discard(rank)
        return new


class Usage:
    """Mean and peak of each rank's readings over a run's training steps. A rank's first reading covers the start-up,
    and counts only until a second reading comes."""

    def __init__(self) -> None:
        self._samples: Counter[int] = Counter()
        self._fields: defaultdict[int, dict[str, tuple[int, float, float]]] = defaultdict(dict)  # count, sum, peak

    def add(self, rank: int, reading: Reading) -> None:
        """Count a rank's new reading."""
        fields = self._fields[rank]
        if self._samples[rank] == 1:
            fields.clear()
        self._samples[rank] += 1
        for field in _AVERAGED:
            if not math.isnan(value := getattr(reading, field)):
                count, total, peak = fields.get(field, (0, 0.0, value))
                fields[field] = count + 1, total + value, max(peak, value)

    def by_rank(self) -> list[dict[str, Any]]:
        """`rank`, number of `samples`, and `mean` and `peak` of use and memory, if these could be read."""
        rows = []
        for rank, fields in sorted(self._fields.items()):
            mean = {field: total / count for field, (count, total, _) in fields.items()}
            peak = {field: largest for field, (*_, largest) in fields.items()}
            rows.append({"rank": rank, "samples": max(self._samples[rank] - 1, 1), "mean": mean, "peak": peak})
        return rows


def seconds_since_start() -> float:
    """Age of this process, interpreter start and imports included."""
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
    if peak is None:  # not on Linux: there, ru_maxrss starts from the launcher's peak
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"now": psutil.Process().memory_info().rss / GIB, "peak": peak / GIB}


def peak_memory_gib(device: torch.device) -> dict[str, float]:
    """The largest memory of this process since its start or the last reset, on the host and on a CUDA `device`."""
    device_peak = device_memory_gib(device)["peak"]
    on_device = {} if device_peak is None else {"peak_device_memory_gib": device_peak}
    return {**on_device, "peak_host_memory_gib": host_memory_gib()["peak"]}


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peaks, so that loading and generating each have their own; host memory's peak on Linux only."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    with contextlib.suppress(OSError):  # not on Linux, or forbidden in a container: the peak then counts from the start
        Path("/proc/self/clear_refs").write_text("5")  # 5: VmHWM, see proc(5)


class PhasePeaks:
    """Peaks by phase, as the kernel and torch's allocator keep them: nothing is sampled, and no peak is missed. A phase
    may come more than once; its largest peak counts."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.by_phase: dict[str, dict[str, float]] = {}
        self._phase: str | None = None
        self._peaks: dict[str, float | None] = {"peak_device_memory_gib": None, "peak_host_memory_gib": None}

    def begin(self, phase: str | None) -> None:
        """End the current phase and begin `phase`. With None, memory counts only for the whole run from now on. If
        `phase` is the current phase, the call costs nothing."""
        if phase != self._phase:
            self.largest()
            reset_peak_memory(self.device)
            self._phase = phase

    def largest(self) -> dict[str, float | None]:
        """This process's largest memory so far in GiB; None for the device without CUDA. Call this, or `begin`, before
        other code resets the peaks for its own measurement."""
        now = peak_memory_gib(self.device)
        _raise(self._peaks, now)
        if self._phase is not None:
            _raise(self.by_phase.setdefault(self._phase, {}), now)
        return dict(self._peaks)


def _raise(peaks: dict, now: dict[str, float]) -> None:
    for key, value in now.items():
        peaks[key] = max(value, peaks.get(key) or 0.0)
