"""A run of accel_sft whose rank 1 is slow in each forward, with a GPU's readings, of which there is one in each step.

accelerate launch --config_file accelerate_configs/ddp.yaml tests/support/slow_rank.py math ...
"""

# ruff: noqa: E402, the environment comes before torch

import os
import time

from accel_sft.launch.environment import prepare_environment

prepare_environment()

import torch

from accel_sft.tracking import idle
from accel_sft.tracking.system import SystemSampler

SLOW_SECONDS = 0.3


def slow(module: torch.nn.Module, inputs: object) -> None:
    if isinstance(module, torch.nn.Embedding) and module.training and os.environ.get("RANK") == "1":
        time.sleep(SLOW_SECONDS)


if __name__ == "__main__":
    from accel_sft.__main__ import main

    torch.nn.modules.module.register_module_forward_pre_hook(slow)
    idle.WARMUP_STEPS, idle.WINDOW_STEPS, idle.WINDOW_READINGS = 2, 4, 3
    SystemSampler._gpu = lambda sampler: (100.0, 1.0)
    SystemSampler.__init__.__kwdefaults__["seconds_between"] = 0.0
    main()
