"""Refuses a run that will not fit: free disk for its checkpoints, free host memory for its optimizer states."""

import shutil
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.api.optimizers import OPTIMIZERS
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory
from accel_sft.launch.collectives import Team, decided_by_main
from accel_sft.launch.info import Launch
from accel_sft.memory import closed_form
from accel_sft.memory.states import FLOAT32, MASTER

MOST_SPARE_BYTES = 64 << 20
"""Most bytes that are kept free on the disk beside a checkpoint, for the other files of a run. Beside a small
checkpoint a third of its size is enough, which is what exported weights take."""


def check_disk(accelerator: Accelerator, model: Any, run_dir: RunDir) -> None:
    """Raise UserError on every rank if a checkpoint of this model does not fit on the disk."""

    def check() -> None:
        size, free = sum(_sizes(model)) * closed_form.CHECKPOINT_BYTES, shutil.disk_usage(run_dir.path).free
        if free < size + (spare := min(size // 3, MOST_SPARE_BYTES)):
            raise UserError(
                f"{run_dir}: a checkpoint takes {_shown(size)} and the files beside it {_shown(spare)}, and "
                f"{_shown(free)} of the disk are free; free space (then go on with --resume auto), name another "
                "--output-dir, or --save-every off"
            )

    decided_by_main(accelerator, check)  # other machines may not see the folder yet


def check_host_memory(accelerator: Accelerator, model: Any, launch: Launch, optimizer: str = "adamw") -> None:
    """Check that host memory is enough for the least that this machine's ranks will put there: optimizer states, where
    they are offloaded or the device is a CPU, and the copy of one checkpoint file. Call it before the optimizer has
    states.

    Args:
        optimizer: the value of `--optimizer`.

    Raises:
        UserError: on every rank, if some machine has too little.
    """
    sizes = _sizes(model)
    if not sizes:
        return
    ranks = launch.shard_ranks if launch.backend == "fsdp" else launch.world_size
    share = 1 / ranks if launch.stage or launch.backend == "fsdp" else 1.0
    states, moments = 0.0, OPTIMIZERS[optimizer].matrix_bytes  # the least
    if launch.offload("optimizer") == "cpu":
        copy = 0 if launch.backend == "fsdp" else MASTER  # FSDP steps the weights themselves, which are there already
        states = sum(sizes) * share * (moments + copy + FLOAT32)
    elif accelerator.device.type == "cpu" and launch.offload("optimizer") == "none":
        states = sum(sizes) * share * (moments + (MASTER if launch.backend == "deepspeed" else 0))
    largest = max(sizes) * (share if launch.shards_weights else 1 / launch.local_world_size)
    each = closed_form.CHECKPOINT_BYTES
    file = min(sum(sizes) / launch.world_size * each, closed_form.FILE_BYTES + largest * each)
    needed = (states + file) * launch.local_world_size

    def check() -> None:
        if (free := host_memory.free_bytes()) < needed:
            raise UserError(
                f"host memory: {launch.local_world_size} processes on this machine need at least {_shown(needed)} for "
                f"optimizer states and checkpoints of {sum(sizes):,} trained parameters, and {_shown(free)} are free "
                f"({host_memory.describe()}); use --adapter lora, a higher ZeRO stage over more "
                "machines, offload to nvme, or free memory"
            )

    Team(accelerator).firsts(check)


def _sizes(model: Any) -> list[int]:
    """Number of elements of each trained parameter, counted whole where ranks hold shards."""
    return [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]


def _shown(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
