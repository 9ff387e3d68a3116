"""Runs accel_sft; as each rank ends, it writes its process groups' timeouts in seconds to OUT/timeouts-RANK."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fsdp2_on_cpu
import torch
from torch.distributed.distributed_c10d import _world

from accel_sft.commands import train
from accel_sft.resilience.exit import leave_together


def record_and_leave() -> None:
    backends = [group._get_backend(torch.device("cpu")) for group in _world.pg_map]
    seconds = [backend.options._timeout.total_seconds() for backend in backends]
    Path(os.environ["OUT"], f"timeouts-{os.environ['RANK']}").write_text(json.dumps(seconds))
    leave_together()


if __name__ == "__main__":
    fsdp2_on_cpu.allow()
    train.leave_together = record_and_leave

    from accel_sft.__main__ import main

    main()
