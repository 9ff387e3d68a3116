"""Accelerate's `parallelism_config`: runs HSDP, sequence and tensor parallelism, and refuses context parallelism.

No torch at import.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING

from accel_sft.io.findings import Finding, error, note
from accel_sft.launch.info import Launch

if TYPE_CHECKING:
    from accelerate import ParallelismConfig


def audit_parallelism(launch: Launch, where: str, *, batching: str, micro_batch_size: str) -> Iterator[Finding]:
    """Yield errors for parallelism that is not supported, and for sizes that do not fit the number of processes."""
    named, sizes = [name for name in launch.arguments if name.startswith("parallelism_config_")], launch.parallelism
    if named and not sizes:
        what = f"--{named[0]} would be ignored in silence: {where} has no parallelism_config"
        yield error(what, "write it there; accelerate_configs/hsdp.yaml and z3_sp.yaml are examples")
    if (size := sizes.get("cp", 1)) > 1:
        what = f"{where}: parallelism_config_cp_size {size}: context parallelism is not supported"
        yield error(what, "z3_sp.yaml shares out the tokens of each row (sequence parallelism)")
    size = (launch.json.get("tensor_parallel") or {}).get("autotp_size") or 0
    if size not in (0, 1):
        what = f"{launch.json_file}: autotp_size {size}: DeepSpeed's tensor parallelism is not supported"
        yield error(what, "accelerate_configs/tp.yaml runs transformers' own")
    if sizes.get("tp", 1) > 1:
        yield from _tensor(launch, where)
    elif sizes.get("sp", 1) > 1:
        yield from _sequence(launch, where, batching=batching, micro_batch_size=micro_batch_size)
    elif launch.backend == "fsdp":
        yield from _fsdp(launch, where)
    elif any(sizes.get(name, 1) > 1 for name in ("dp_replicate", "dp_shard")):
        what = f"{where}: parallelism_config: sizes of data parallelism are FSDP's"
        yield error(what, "remove them; accelerate_configs/hsdp.yaml is a launch with them")


def parallelism_config(launch: Launch, *, train: bool) -> ParallelismConfig | None:
    """Return the `ParallelismConfig` to build the Accelerator with; None if the launch names no sizes.

    The number of ranks that one copy of the model is sharded over, or of groups that train on different rows, is
    computed from the number of processes, so that only `--num_processes` has to be set.

    Args:
        train: if False, sequence parallelism is off.
    """
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
    """The launcher's flags that start this launch file with another number of processes."""
    tensor = launch.parallelism.get("tp", 1) > 1  # all processes share each matrix
    return "--num_processes", f"{processes}", *(("--parallelism_config_tp_size", f"{processes}") if tensor else ())


def fitted(launch: Launch, devices: int) -> Launch:
    """Return the launch as a machine with so many accelerators runs it: a rank for each, if its file asks for more.

    A number of ranks on the command line is kept, as is that of several machines, or of a file whose ranks form groups
    for more than data parallelism: the audit refuses these where they do not fit.
    """
    grouped = launch.parallelism or launch.machines > 1
    if grouped or "num_processes" in launch.arguments or "num_processes" not in launch.yaml:
        return launch
    if not 0 < devices < launch.local_world_size:
        return launch
    ranks = {"WORLD_SIZE": f"{devices}", "LOCAL_WORLD_SIZE": f"{devices}"}
    return dataclasses.replace(launch, environment={**launch.environment, **ranks})


def audit_devices(launch: Launch, devices: int, where: str) -> Iterator[Finding]:
    """Yield an error for more ranks than accelerators, and notes where the file's number of ranks is not theirs."""
    ranks = launch.local_world_size
    gpus = f"{devices} GPU{'s' * (devices > 1)}"
    if ranks > devices:
        instead = "ddp" if launch.tensor_ranks > 1 else "z3" if launch.sequence_ranks > 1 else "fsdp2"
        fits = f"accelerate_configs/{instead}.yaml runs on {gpus}"
        fix = fits if launch.parallelism else f"--num_processes {devices * launch.machines}"
        yield error(f"{ranks} processes on this machine, {gpus}", fix)
    elif "num_processes" in launch.yaml and "num_processes" not in launch.arguments and launch.machines == 1:
        group = max(launch.parallelism.get(name, 1) for name in ("dp_replicate", "sp")) if launch.parallelism else 1
        if ranks < (most := devices - devices % group):
            flags = " ".join(sized(launch, most))
            yield note(f"{where}: {ranks} of this machine's {gpus} used", f"for more: {flags} in front of -m")
        elif (requested := int(launch.yaml["num_processes"])) > ranks:  # a file may have it in quotes
            what = f"{where}: for {requested} processes, but this machine has {gpus}"
            yield note(what, "a process for each; the loss curve is the same")


def _fsdp(launch: Launch, where: str) -> Iterator[Finding]:
    if launch.environment.get("FSDP_VERSION", "1") != "2":
        yield error(f"{where}: FSDP 1 is not supported", "fsdp_version: 2 below fsdp_config")
    copies, shard = launch.parallelism.get("dp_replicate", 1), launch.parallelism.get("dp_shard", 1)
    processes = f"{launch.world_size} process{'es' * (launch.world_size > 1)}"
    if copies > 1 and (launch.world_size % copies or launch.shard_ranks < 2):
        count = f"a multiple of {copies} processes, {2 * copies} or more"
        what = f"{where}: {copies} sharded copies of the model need {count}, not {launch.world_size}"
        fix = f"--num_processes {2 * copies}, or another multiple of {copies}"
        yield error(what, f"{fix}; accelerate_configs/fsdp2.yaml has one copy")
    elif shard not in (1, launch.shard_ranks):
        what = f"{where}: parallelism_config_dp_shard_size {shard}, where {processes} make it {launch.shard_ranks}"
        yield error(what, "remove it: it follows from --num_processes")


def _tensor(launch: Launch, where: str) -> Iterator[Finding]:
    ranks, sizes = launch.parallelism["tp"], launch.parallelism
    size = f"{where}: parallelism_config_tp_size {ranks}"
    if launch.backend in ("deepspeed", "fsdp"):
        name = {"deepspeed": f"ZeRO stage {launch.stage}", "fsdp": "FSDP"}[launch.backend]
        fix = "accelerate_configs/tp.yaml has it alone; z3.yaml and fsdp2.yaml share out every weight without it"
        yield error(f"{size}: tensor parallelism beside {name} is not supported", fix)
    elif any(sizes[name] > 1 for name in ("dp_replicate", "dp_shard", "sp")) or ranks != launch.world_size:
        processes = f"{launch.world_size} process{'es' * (launch.world_size > 1)}"
        what = f"{size}, and {processes}: tensor parallelism beside data parallelism is not supported"
        yield error(what, " ".join(sized(launch, max(launch.world_size, 2))) + ", and no other size")
    if launch.precision[0] == "fp16":
        what = f"{where}: float16 under tensor parallelism: each rank would see other overflows"
        yield error(what, "--mixed_precision bf16 or no")


def _sequence(launch: Launch, where: str, *, batching: str, micro_batch_size: str) -> Iterator[Finding]:
    ranks, processes = launch.parallelism["sp"], launch.world_size
    if launch.backend != "deepspeed":
        what = f"{where}: parallelism_config_sp_size {ranks}: sequence parallelism is DeepSpeed's"
        yield error(what, "accelerate_configs/z3_sp.yaml is a launch with it")
        return
    if processes % ranks:
        count = f"{processes} process{'es' * (processes > 1)}"
        what = f"{where}: {count} cannot be divided into groups of {ranks}, which share a row"
        yield error(what, f"--num_processes {ranks}, or another multiple of parallelism_config_sp_size")
    if launch.parallelism["dp_replicate"] > 1 or launch.parallelism["dp_shard"] not in (1, processes // ranks):
        what = f"{where}: parallelism_config: sizes of data parallelism beside sequence parallelism"
        yield error(what, "remove them: they follow from --num_processes")
    if launch.stage == 3 and launch.zero.get("reduce_scatter") is False:
        what = f"{launch.json_file}: reduce_scatter false: DeepSpeed would scale gradients by the size of parameters"
        yield error(what, "remove it")
    if batching not in ("auto", "padded") or micro_batch_size not in ("auto", "1"):
        flag = "--batching" if batching not in ("auto", "padded") else "--micro-batch-size"
        yield error(f"{flag}: under sequence parallelism a forward is one row, shared by {ranks} ranks", "leave it out")
