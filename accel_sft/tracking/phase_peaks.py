"""Keeps the largest memory of this process within each phase of a run, and in the whole run."""

import torch

from accel_sft.tracking.system import peak_memory_gib, reset_peak_memory


class PhasePeaks:
    """Peaks by phase, as the kernel and torch's allocator keep them: nothing is sampled, and no peak is missed.

    A phase may come more than once; its largest counts.

    Attributes:
        by_phase: for each phase so far, `peak_host_memory_gib` and, with CUDA, `peak_device_memory_gib`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.by_phase: dict[str, dict[str, float]] = {}
        self._phase: str | None = None
        self._peaks: dict[str, float | None] = {"peak_device_memory_gib": None, "peak_host_memory_gib": None}

    def begin(self, phase: str | None) -> None:
        """End the current phase and begin this one, or none: what follows None counts only for the whole run. If this
        phase is the current one, the call costs nothing."""
        if phase != self._phase:
            self.largest()
            reset_peak_memory(self.device)
            self._phase = phase

    def largest(self) -> dict[str, float | None]:
        """This process's largest memory so far in GiB; None for the device without CUDA.

        Call it, or `begin`, before anything that resets the peaks to measure its own.
        """
        now = peak_memory_gib(self.device)
        _raise(self._peaks, now)
        if self._phase is not None:
            _raise(self.by_phase.setdefault(self._phase, {}), now)
        return dict(self._peaks)


def _raise(peaks: dict, now: dict[str, float]) -> None:
    for key, value in now.items():
        peaks[key] = max(value, peaks.get(key) or 0.0)
