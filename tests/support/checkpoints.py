"""Checkpoints of models that a test trains by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from accel_sft.checkpoint import shards
from accel_sft.checkpoint.background import Checkpoints
from accel_sft.checkpoint.shards import Averages
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.info import launch_of_this_process


def saved(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    run_dir: RunDir,
    state: dict[str, Any],
    keep: str = "1",
    extra: shards.Extra | None = None,
) -> Path:
    """Write a checkpoint, and return once it is complete."""
    return Checkpoints(accelerator, launch_of_this_process(), model, optimizer, run_dir, keep).save(
        state, extra, wait=True
    )


def write(accelerator: Any, model: Any, optimizer: Any, folder: Path, averages: Averages | None = None) -> None:
    """Write this rank's files of a checkpoint into `folder`."""
    copied = shards.copied(accelerator, model, optimizer, None, averages)
    shards.write(copied, folder, accelerator.process_index)
