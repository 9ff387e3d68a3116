"""Runs accel_sft as on a machine with PLANTED_GPUS GPUs, as far as the launch goes; ranks compute on the CPU.

accelerate launch ... -m planted_gpus math
"""

from __future__ import annotations

import os

from accel_sft.launch import start

if __name__ == "__main__":
    count, audit = int(os.environ["PLANTED_GPUS"]), start.audit
    start.device_count = lambda: count
    start.audit = lambda config, launch: audit(config, launch, devices=count)

    from accel_sft.__main__ import main

    main()
