"""Runs accel_sft as on a CPU with given bf16 instructions: `accelerate launch ... -m planted_cpu math`.

The environment variable PLANTED_FLAGS names the instructions; PLANTED_FLAGS_1 names rank 1's, if they differ.
PLANTED_DEVICE names the GPU whose peak the ranks count by.
"""

from __future__ import annotations

import os
import runpy

from accel_sft.launch import audit, precision
from accel_sft.training import predicted


def planted() -> list[str]:
    own = f"PLANTED_FLAGS_{os.environ.get('RANK', '0')}"
    return os.environ.get(own, os.environ.get("PLANTED_FLAGS", "")).split()


if __name__ == "__main__":
    precision.cpu_flags = audit.cpu_flags = planted
    predicted.device_name = lambda device: os.environ.get("PLANTED_DEVICE", "")

    runpy.run_module("fsdp2_on_cpu", run_name="__main__")
