"""NVML's answers, planted: a GPU at work that nothing slows down, until a test changes an answer."""

from __future__ import annotations

import os
import types


class Nvml:
    """Stands for the module `pynvml`; an answer of None is "Not Supported", as of a MIG slice, an error is raised."""

    NVML_CLOCK_SM = NVML_GPU_UTILIZATION_SAMPLES = 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    class NVMLError_LibraryNotFound(NVMLError):
        pass

    def __init__(self, **answers):
        self.answers = {
            **{"Init": 0, "Shutdown": 0, "SystemGetDriverVersion": "580.65.06", "SystemGetCudaDriverVersion_v2": 13000},
            **{"Count": 1, "HandleByIndex": 0, "Name": "NVIDIA H100", "CudaComputeCapability": (9, 0)},
            "MemoryInfo": types.SimpleNamespace(total=80 * 2**30, used=2**24),
            "UtilizationRates": types.SimpleNamespace(gpu=7),
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
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answer = self.answers[name.removeprefix("nvml").removeprefix("DeviceGet")]

        def ask(*arguments):
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                raise self.NVMLError_NotSupported("Not Supported")
            if isinstance(answer, dict):
                return [types.SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in answer.items()]
            return answer

        return ask
