"""Accelerate's `parallelism_config`: runs HSDP, sequence and tensor parallelism, and refuses context parallelism.

No torch at import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_sft.io.findings import Finding, error, note
from accel_sft.launch.info import DIMENSIONS, Launch

if TYPE_CHECKING:
    from accelerate import ParallelismConfig


def audit_parallelism(
    launch: Launch, where: str, *, batching: str, micro_batch_size: str, loss: str = "sft"
) -> Iterator[Finding]:
    """Yield errors for parallelism that is not supported, and for sizes that do not fit the number of processes."""
    named = [name for name in launch.arguments if name.startswith("parallelism_config_")]
    if named and not launch.parallelism:
        what = f"--{named[0]} would be silently ignored, because {where} has no parallelism_config"
        yield error(what, "add one; accelerate_configs/hsdp.yaml and z3_sp.yaml are examples")
    if not _is_supported(launch):
        sizes = ", ".join(f"{name} {size}" for name, size in launch.parallelism.items() if size > 1)
        over = f"{launch.world_size} ranks ({launch.backend})"
        what = f"{where}: parallelism_config of {sizes} over {over} is not supported"
        yield error(what, "choose other sizes or remove them; hsdp.yaml, z3_sp.yaml and tp.yaml are examples")
    if launch.tensor_ranks > 1 and launch.precision[0] == "fp16":
        what = f"{where}: under tensor parallelism in float16, ranks would see different overflows"
        yield error(what, "use --mixed_precision bf16 or no")
    if launch.sequence_ranks > 1:
        if launch.stage == 3 and launch.zero.get("reduce_scatter") is False:
            what = "with reduce_scatter false, DeepSpeed would scale gradients by the size of parameters"
            yield error(f"{launch.json_file}: {what}", "remove it")
        allowed = {"--batching": (batching, "padded"), "--micro-batch-size": (micro_batch_size, "1")}
        for flag, (value, needed) in {**allowed, "--loss": (loss, "sft")}.items():
            if value not in ("auto", needed):
                what = f"{flag}: under sequence parallelism a forward is one row, shared by several ranks"
                yield error(what, "leave it out, or launch with accelerate_configs/z3.yaml")
    if launch.backend == "fsdp" and launch.environment.get("FSDP_VERSION", "1") != "2":
        yield error(f"{where}: FSDP 1 is not supported", "set fsdp_version: 2 in fsdp_config")


def _is_supported(launch: Launch) -> bool:
    """Whether the launch has one kind of parallelism, with a backend for it and sizes that fit the number of ranks."""
    copies, shard, tensor, context, sequence = (launch.parallelism.get(name, 1) for name in DIMENSIONS)
    ranks = launch.world_size
    if context > 1 or tensor > 1:
        return launch.backend == "ddp" and max(copies, shard, context, sequence) == 1 and tensor == ranks
    if sequence > 1:
        groups = ranks // sequence
        return launch.backend == "deepspeed" and ranks == groups * sequence and copies == 1 and shard in (1, groups)
    if launch.backend == "fsdp":
        return shard in (1, launch.shard_ranks) and (copies == 1 or (ranks % copies == 0 and launch.shard_ranks > 1))
    return max(copies, shard) == 1


def parallelism_config(launch: Launch, *, train: bool) -> ParallelismConfig | None:
    """Return the `ParallelismConfig` to build the Accelerator with; None if the launch names no sizes. Without `train`,
    sequence parallelism is off."""
    from accelerate import ParallelismConfig

    if not launch.parallelism:
        return None
    if launch.backend == "fsdp":
        return ParallelismConfig(dp_shard_size=launch.shard_ranks)
    if launch.tensor_ranks > 1:
        return ParallelismConfig(tp_size=launch.tensor_ranks)
    sequence = launch.sequence_ranks if train else 1
    shard = launch.world_size // sequence if sequence > 1 else 1
    return ParallelismConfig(dp_replicate_size=1, dp_shard_size=shard, tp_size=1, cp_size=1, sp_size=sequence)


def sized(launch: Launch, processes: int) -> tuple[str, ...]:
    """The launcher's flags that start this launch file with a different number of processes."""
    tensor = launch.parallelism.get("tp", 1) > 1  # all processes share each matrix
    return "--num_processes", f"{processes}", *(("--parallelism_config_tp_size", f"{processes}") if tensor else ())


def fitted(launch: Launch, devices: int) -> Launch:
    """Return the launch with one rank per accelerator if the file asks for more ranks than there are `devices`. The
    number of ranks stays if the command line names it, on several machines, and with a `parallelism_config`."""
    grouped = launch.parallelism or launch.machines > 1
    if grouped or "num_processes" in launch.arguments or "num_processes" not in launch.yaml:
        return launch
    if not 0 < devices < launch.local_world_size:
        return launch
    ranks = {"WORLD_SIZE": f"{devices}", "LOCAL_WORLD_SIZE": f"{devices}"}
    return dataclasses.replace(launch, environment={**launch.environment, **ranks})


def audit_devices(launch: Launch, devices: int, where: str) -> Iterator[Finding]:
    """Yield an error for more ranks than accelerators, and a note if the file does not ask for one rank each."""
    ranks, gpus = launch.local_world_size, f"{devices} GPU{'s' * (devices > 1)}"
    if ranks > devices:
        fix = f"use --num_processes {devices * launch.machines}"
        if launch.parallelism:
            fix = f"use accelerate_configs/fsdp2.yaml, which runs on {gpus}"
        yield error(f"{ranks} processes would share this machine's {gpus}", fix)
    elif "num_processes" in launch.yaml and "num_processes" not in launch.arguments and launch.machines == 1:
        most = devices - devices % ranks if launch.parallelism else devices  # ranks may form groups
        if ranks < most:
            flags = " ".join(sized(launch, most))
            yield note(f"{where}: {ranks} of this machine's {gpus} are used", f"to use more, add {flags} before -m")
        elif (requested := int(launch.yaml["num_processes"])) > ranks:  # int(): the file may quote the number
            what = f"{where}: {requested} processes requested, but this machine has {gpus}"
            yield note(what, "one process runs per GPU; the loss curve is the same")
