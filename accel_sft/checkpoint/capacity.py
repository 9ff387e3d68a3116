"""Whether there is room for what a run is about to need, on the disk and in host memory: told before, not amid it."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_sft.checkpoint import shards
from accel_sft.launch import host_memory
from accel_sft.launch.collectives import raise_first
from accel_sft.launch.info import Launch

SPARE_BYTES = 64 << 20
"""Left free beside a checkpoint, for what else a run writes."""
MOMENTS, COPY, GRADIENT = 8, 4, 4
"""Bytes of a trained parameter's element in float32: AdamW's two moments, a copy of the weight, its gradient."""


def check_disk(accelerator: Accelerator, model: torch.nn.Module, run_dir: Path) -> None:
    """See that a checkpoint of this model has room on the disk.

    Raises:
        UserError: on every rank, if it has not.
    """
    problem = None
    if accelerator.is_main_process:  # the folder need not be there for the others yet
        needed, free = sum(_sizes(model)) * shards.BYTES + SPARE_BYTES, shutil.disk_usage(run_dir).free
        if free < needed:
            problem = (
                f"{run_dir}: a checkpoint takes {_gib(needed)}, and {_gib(free)} of the disk are free; free space "
                "(then go on with --resume auto), name another --output-dir, or --save-every off"
            )
    raise_first(problem)


def check_host_memory(accelerator: Accelerator, model: torch.nn.Module, launch: Launch) -> None:
    """See that host memory takes what this machine's ranks will put there: optimizer states that are offloaded, or on a
    CPU all of them, and what a checkpoint's files are copied to. To be called before the first of it is made.

    It is the least they will take; what the libraries hold beside is not known.

    Raises:
        UserError: on every rank, if some machine has too little.
    """
    sizes = _sizes(model)
    if not sizes:
        return
    share = 1 / launch.world_size if launch.stage or launch.backend == "fsdp" else 1.0
    states = 0.0
    if launch.offload("optimizer") == "cpu":
        states = sum(sizes) * share * (MOMENTS + COPY + GRADIENT)
    elif accelerator.device.type == "cpu" and launch.offload("optimizer") == "none":
        states = sum(sizes) * share * (MOMENTS + (COPY if launch.backend == "deepspeed" else 0))
    largest = max(sizes) * (share if launch.stage == 3 or launch.backend == "fsdp" else 1 / launch.local_world_size)
    file = min(sum(sizes) / launch.world_size * shards.BYTES, shards.FILE_BYTES + largest * shards.BYTES)
    needed, free = (states + file) * launch.local_world_size, host_memory.free_bytes()
    problem = (
        f"host memory: {launch.local_world_size} processes on this machine need at least {_gib(needed)} for optimizer "
        f"states and checkpoints of {sum(sizes):,} trained parameters, and {_gib(free)} are free "
        f"({host_memory.describe()}); use --adapter lora, a higher ZeRO stage over more "
        "machines, offload to nvme, or free memory"
    )
    raise_first(problem if free < needed and launch.environment.get("LOCAL_RANK", "0") == "0" else None)


def _sizes(model: torch.nn.Module) -> list[int]:
    """Elements of each trained parameter, whole."""
    return [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
