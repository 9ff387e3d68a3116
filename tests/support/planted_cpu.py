"""accel_sft on a CPU with the instructions for bf16 that a test plants: `accelerate launch ... -m planted_cpu math`.

PLANTED_FLAGS has their names, PLANTED_FLAGS_1 those of rank 1 where its machine is another one.
"""

from __future__ import annotations

import os
import runpy

from accel_sft.launch import audit, precision


def planted() -> list[str]:
    own = f"PLANTED_FLAGS_{os.environ.get('RANK', '0')}"
    return os.environ.get(own, os.environ.get("PLANTED_FLAGS", "")).split()


if __name__ == "__main__":
    precision.cpu_flags = audit.cpu_flags = planted

    runpy.run_module("fsdp2_on_cpu", run_name="__main__")
