"""NVML's answers, planted: a GPU at work that nothing slows down, until a test changes an answer."""

from __future__ import annotations

import os
import types


class Nvml:
    """Stands for the module `pynvml`; an answer of None is "Not Supported", as NVML says of a MIG slice."""

    NVML_CLOCK_SM = NVML_GPU_UTILIZATION_SAMPLES = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self, **answers):
        self.answers = {
            "ClockInfo": 1700,
            "MaxClockInfo": 1980,
            "CurrentClocksEventReasons": 0,
            "PowerManagementLimit": 700_000,
            "PowerManagementDefaultLimit": 700_000,
            "ComputeRunningProcesses": {os.getpid(): 9 * 2**30},
            "MaxPcieLinkGeneration": 5,
            "MaxPcieLinkWidth": 16,
            **answers,
        }

    def __getattr__(self, name):
        if not name.startswith("nvmlDeviceGet"):
            raise AttributeError(name)
        answer = self.answers[name.removeprefix("nvmlDeviceGet")]

        def ask(handle, *kind):
            if answer is None:
                raise self.NVMLError_NotSupported("Not Supported")
            if isinstance(answer, dict):
                return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in answer.items()]
            return answer

        return ask
