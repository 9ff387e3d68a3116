"""Says what a run's checkpoints take, and refuses them where the disk or host memory has no room for them."""

import shutil
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory
from accel_sft.launch.collectives import decided_by_main
from accel_sft.launch.info import Launch
from accel_sft.memory.estimate import checkpoint_bytes_each
from accel_sft.memory.job import pinned
from accel_sft.memory.states import FLOAT32, IMPORTANCES

MOST_SPARE_BYTES = 64 << 20
"""Most bytes that are kept free on the disk beside a checkpoint, for the other files of a run. Beside a small
checkpoint a third of its size is enough, which is what exported weights take."""


def check_disk(
    accelerator: Accelerator, model: Any, run_dir: RunDir, *, averaged: bool = False, checkpoints: int = 1
) -> None:
    """Raise UserError on every rank if so many more checkpoints of this model (and of averages) do not fit on the
    disk."""

    def check() -> None:
        size, free = checkpoint_bytes(model, averaged=averaged), shutil.disk_usage(run_dir.path).free
        if free < size * checkpoints + (spare := min(size // 3, MOST_SPARE_BYTES)):
            what = "a checkpoint takes" if checkpoints == 1 else f"{checkpoints} checkpoints that are kept take"
            fix = "or --save-every off" if checkpoints == 1 else "or keep fewer with --keep-checkpoints"
            raise UserError(
                f"{run_dir}: {what} {_shown(size * checkpoints)}, other files {_shown(spare)}, and {_shown(free)} are "
                f"free; free space (then --resume auto), name another --output-dir, {fix}"
            )

    decided_by_main(accelerator, check)  # other machines may not see the folder yet


def checkpoint_bytes(model: Any, *, averaged: bool = False, in_pinned_memory: bool = False) -> int:
    """Return how many bytes a checkpoint of this model takes, of all ranks together, at most: on the disk, or in pinned
    host memory, which rounds each tensor up. Weights are counted whole where ranks hold shards."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sizes: list[float] = [getattr(p, "ds_numel", p.numel()) for p in trained.values()]
    if in_pinned_memory:
        sizes = [pinned(FLOAT32 * size) / FLOAT32 for size in sizes]
    is_adalora = any(".lora_E." in name for name in trained)
    return int(sum(sizes)) * (checkpoint_bytes_each(averaged) + (IMPORTANCES if is_adalora else 0))


def no_room_for_a_copy(model: Any, launch: Launch, *, averaged: bool = False, on_gpu: bool = False) -> str | None:
    """Say why this machine's ranks cannot keep a copy of what they write of a checkpoint; None if they can."""
    ranks = launch.shard_ranks if launch.backend == "fsdp" else launch.world_size
    pins = on_gpu and launch.offload("optimizer") == "none"
    size = checkpoint_bytes(model, averaged=averaged, in_pinned_memory=pins) * min(launch.local_world_size / ranks, 1.0)
    return no_room(size, "what is saved")


def no_room(size: float, what: str) -> str | None:
    """Say why a copy of this size cannot be kept in host memory; None if it can, with a third of its size left free."""
    if (free := host_memory.free_bytes()) >= size * 4 / 3:
        return None
    return f"host memory: a copy of {what} takes {_shown(size)}, and {_shown(free)} are free"


def _shown(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
