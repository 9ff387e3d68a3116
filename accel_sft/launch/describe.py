"""Describes the resolved launch: as a line for the terminal, as the record in run.json, and as a command line."""

import os
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.launch.environment import usable_cores
from accel_sft.launch.groups import sequence_ranks, tensor_ranks
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import launcher_command, torchrun_command
from accel_sft.launch.precision import cpu_name
from accel_sft.launch.recordable import masked_words, recordable, versions, without_secrets


def describe(accelerator: Accelerator, launch: Launch) -> str:
    """The resolved launch as one line for the terminal; `launch_record` has more."""
    value, why = launch.precision
    places = [(what, launch.offload(what)) for what in ("optimizer", "param")]
    offload = "".join(f", {what} to {place}" for what, place in places if place != "none")
    backends = {"plain": "one process", "ddp": "data parallel (ddp)", "fsdp": "FSDP"}
    if launch.tensor_ranks > 1:
        backends["ddp"] = "tensor parallel"
    ranks, where = accelerator.num_processes, f" on {launch.machines} machines" * (launch.machines > 1)
    parts = [
        launch.config_file,
        launch.json_file,
        backends.get(launch.backend, f"DeepSpeed ZeRO-{launch.stage}") + offload + _groups(launch),
        f"{ranks} process{'es' * (ranks > 1)}{where}" if launch.backend != "plain" else None,
        device_name(accelerator),
        f"{'fp32' if value == 'no' else value} ({why})",
    ]
    return ", ".join(str(part) for part in parts if part)


def _groups(launch: Launch) -> str:
    """How ranks are grouped, in words; "" if all ranks form one group."""
    if launch.tensor_ranks > 1:
        return f", each matrix shared by {launch.tensor_ranks} ranks"
    if launch.sequence_ranks > 1:
        return f", rows shared by {launch.sequence_ranks} ranks"
    copies = launch.world_size // launch.shard_ranks if launch.backend == "fsdp" else 1
    return f", {copies} copies of the model, each on {launch.shard_ranks} ranks" if copies > 1 else ""


def launch_record(accelerator: Accelerator, launch: Launch) -> dict[str, Any]:
    """The resolved launch for `run.json`: configuration, yaml text, versions, devices. Secrets are left out."""
    plugin = accelerator.state.deepspeed_plugin
    return {
        "yaml_path": str(launch.config_file) if launch.config_file else None,
        "yaml": without_secrets(launch.yaml),
        "backend": launch.backend,
        "zero_stage": launch.stage if plugin else None,
        "offload": {what: launch.offload(what) for what in ("optimizer", "param")},
        "processes": accelerator.num_processes,
        "machines": launch.machines,
        **({"parallelism": launch.parallelism} if launch.parallelism else {}),
        "precision": launch.precision[0],
        "threads_per_process": torch.get_num_threads(),
        "communication": accelerator.state.backend,
        "device": device_name(accelerator),
        "host": {"platform": platform.platform(), "processor": cpu_name(), "cores": usable_cores()},
        "deepspeed_config": recordable(plugin.deepspeed_config) if plugin else None,
        "versions": versions(),
    }


def device_name(accelerator: Accelerator) -> str:
    """The name of the device that this rank computes on; for a CPU with its number of cores."""
    if accelerator.device.type == "cuda":
        return torch.cuda.get_device_name(accelerator.device)
    return f"{accelerator.device.type} ({usable_cores()} cores)" if accelerator.device.type == "cpu" else "mps"


def started_by() -> list[str]:
    """The words of the command line that started this process, as the user typed them."""
    words = launcher_command()[0] or torchrun_command() or sys.orig_argv
    if Path(words[0]).name.startswith("python") and not words[1].startswith("-"):  # the interpreter of a script
        words = words[1:]
    return list(words)


def resume_command(run_dir: Path, output_dir: str | None) -> str:
    """The command line that continues this run, for a shell in the folder where the run was started. Secrets are
    hidden, because the command goes into result.json."""
    words = started_by()
    if output_dir is None:
        words += ["--output-dir", shown_folder(run_dir)]
    if "--resume auto" not in " ".join(words).replace("=", " "):
        words += ["--resume", "auto"]
    return shlex.join(masked_words(words))


def shown_folder(folder: Path) -> str:
    """The folder's path for a command line: relative if it is below the working directory."""
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def layout_of(accelerator: Accelerator) -> dict[str, Any]:
    """How this launch divides the run between processes, and in which precision it computes."""
    plugin, sequence = accelerator.state.deepspeed_plugin, sequence_ranks(accelerator)
    tensor = tensor_ranks(accelerator)
    return {
        "ranks": accelerator.num_processes,
        "backend": accelerator.distributed_type.value,
        "zero_stage": plugin.zero_stage if plugin else None,
        "precision": accelerator.mixed_precision,
        **({"ranks_of_a_row": sequence} if sequence > 1 else {}),
        **({"ranks_of_a_matrix": tensor} if tensor > 1 else {}),
    }


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between two results of `layout_of`, in words."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key.replace('_', ' ')} {before.get(key)}, now {now.get(key)}".lower() for key in keys]
