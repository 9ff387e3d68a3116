"""Describes this machine and its software, without torch."""

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from typing import Any

import psutil

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
        "packages": {
            package.name: package.version
            for package in sorted(importlib.metadata.distributions(), key=lambda package: (package.name or "").lower())
        },
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
    """Whether ranks started here would have bf16 instructions: of NVIDIA's GPUs, by their driver, else of the CPU."""
    gpus = nvidia_gpus()[1] if with_gpus else []
    return all(gpu["capability"] >= _CAPABILITY for gpu in gpus) if gpus else bool(cpu_flags())
