"""Describes the machine and software of a comparison for its record, without torch."""

import contextlib
import importlib.metadata
import os
import platform
import re
import sys
from pathlib import Path
from typing import Any

import psutil

from accel_sft.launch.environment import usable_cores
from accel_sft.launch.recordable import recordable, versions

_VARIABLES = re.compile(r"(ACCELERATE|ACCEL_SFT|CUDA|DS|GLOO|HF|MKL|NCCL|OMP|OPENBLAS|PYTORCH|TORCH|TRITON)_")
"""Prefixes of the environment variables that may change what a launch does."""


def environment() -> dict[str, Any]:
    """Versions, platform, cores, host memory, devices and environment variables; secrets are left out."""
    memory = psutil.virtual_memory()
    driver, devices = _devices()
    return {
        "versions": versions(),
        "packages": {each.name: each.version for each in sorted(importlib.metadata.distributions(), key=_name)},
        "python": sys.executable,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": usable_cores(),
        "host_memory_gib": memory.total / 2**30,
        "driver": driver,
        "devices": devices,
        "variables": {
            key: recordable(value, key) for key, value in sorted(os.environ.items()) if _VARIABLES.match(key)
        },
    }


def _name(distribution: importlib.metadata.Distribution) -> str:
    return (distribution.name or "").lower()


def _processor() -> str:
    with contextlib.suppress(OSError):
        if found := re.search(r"^model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.M):
            return found[1]
    return platform.processor() or platform.machine()


def _devices() -> tuple[str | None, list[dict[str, Any]]]:
    """The NVIDIA driver's version, and each GPU's name and memory; None and [] if NVML finds no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:  # no driver here
        return None, []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver = pynvml.nvmlSystemGetDriverVersion()
        found = [
            {"name": pynvml.nvmlDeviceGetName(each), "memory_gib": pynvml.nvmlDeviceGetMemoryInfo(each).total / 2**30}
            for each in handles
        ]
    finally:
        pynvml.nvmlShutdown()
    return driver, found
