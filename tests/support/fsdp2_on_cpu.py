"""Runs accel_sft under FSDP2 on a machine without GPUs: `accelerate launch ... -m fsdp2_on_cpu math ...`.

Without GPUs Accelerate forms no process group for an FSDP launch, so the audit refuses it. Here Accelerate gets a gloo
group and the CPU as every rank's device, and the audit sees one device for each rank. Offloaded shards are not pinned,
since torch needs a GPU for that. Everything else is Accelerate's and PyTorch's own code.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy

from accel_sft.launch import start

RUNS_HERE = hasattr(torch.cpu.Stream, "record_event")
"""Whether this torch's FSDP2 runs on CPUs.

FSDP2 of torch 2.6 does not: a CPU stream lacks methods that it calls, and gathered weights change before the backward
has used them.
"""


def allow() -> None:
    """From now on, the ranks of an FSDP launch form a group on CPUs; other launches do not change."""
    group, device, audit = PartialState._prepare_backend, PartialState.set_device, start.audit

    def over_gloo(self: PartialState, *arguments: Any) -> tuple[str, DistributedType]:
        return ("gloo", DistributedType.MULTI_GPU) if _is_fsdp() else group(self, *arguments)

    def on_cpu(self: PartialState) -> None:
        if _is_fsdp():
            self.device = torch.device("cpu")
        else:
            device(self)

    def audited(config: Any, launch: Any) -> Any:
        return audit(config, launch, devices=int(os.environ["LOCAL_WORLD_SIZE"]) if _is_fsdp() else None)

    PartialState._prepare_backend, PartialState.set_device = over_gloo, on_cpu
    CPUOffloadPolicy.__init__.__defaults__ = (False,)
    start.audit = audited


def _is_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


if __name__ == "__main__":
    allow()
    from accel_sft.__main__ import main

    main()
