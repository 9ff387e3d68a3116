"""Makes a plan for each launch file (whether the job fits, how large a forward may be, how fast it is) and recommends
one. The machine is this one, or one that the user describes."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.limits import TENSOR_PARALLEL, launch_problem
from accel_sft.api.options import flag_of
from accel_sft.launch import host_memory
from accel_sft.launch.info import Launch, launch_of_yaml
from accel_sft.launch.machine_state import nvidia_gpus, this_machine_computes_bf16
from accel_sft.launch.parallelism import audit_parallelism, sized
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.estimate import Estimate, estimate
from accel_sft.memory.job import Job
from accel_sft.tools.plan.speed import Speed, speed

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PlannedMachine:
    """The machine that a launch is planned for. If a launch has several machines, all are alike."""

    gpus: int  # with 0, ranks train on the CPU
    gpu_bytes: float | None
    host_bytes: float
    bf16: bool = True  # native bf16; assumed for GPUs that the user describes
    gpu: str = ""  # the name; "" if the user describes the GPUs, or if their names differ


def machine(gpus: int | None, gpu_gib: float | None, host_gib: float | None) -> PlannedMachine:
    """Return the machine that the user describes; what the user leaves out is taken from this machine: GPUs from
    NVIDIA's driver, and the host memory that is free within the container's limit."""
    own = nvidia_gpus()[1] if gpus is None or (gpus and gpu_gib is None) else []
    sizes, names = [gpu["memory_gib"] for gpu in own], {gpu["name"] for gpu in own}
    count = len(sizes) if gpus is None else gpus
    if gpus is None and gpu_gib is not None and not sizes:
        count = 1
    if count and gpu_gib is None and (not sizes or None in sizes):
        reason = f"the driver does not report it for {', '.join(names)}" if sizes else "this machine has no GPU"
        raise UserError(f"--gpu-memory: give the GiB of one GPU, because {reason}")
    return PlannedMachine(
        gpus=count,
        gpu_bytes=(min(sizes) * GIB if count else None) if gpu_gib is None else gpu_gib * GIB,
        host_bytes=host_memory.free_bytes() if host_gib is None else host_gib * GIB,
        bf16=bool(gpus or (count and not sizes)) or this_machine_computes_bf16(with_gpus=count > 0),
        gpu=names.pop() if len(names) == 1 and gpu_gib is None else "",
    )


SIMPLEST_FIRST: tuple[str, ...] = ("ddp", "fsdp2", "z0", "z1", "z2", "z3", "hsdp", "z2_offload", "fsdp2_offload")
SIMPLEST_FIRST += ("z3_twin_flow", "z3_offload", "z3_nvme", "multinode_z3", "tp", "z3_sp")
"""Shipped launch files, the simplest first; of equally fast launch files, the simplest is recommended."""
ALIKE = 0.15
"""If step times differ by no more than this share, the speed model cannot tell which launch file is faster."""
MOST_TOKENS = 2**17
"""Maximum number of tokens of one forward; no larger forward is tried."""
MARGIN = 0.92
"""Share of a memory that a prediction may fill without a warning; the rest exceeds the predictions' mean error."""
_Memory = tuple[float | None, float | None]
"""Bytes of one GPU and of the host; None if unknown, or if there is no GPU."""
_ADDED = {"gradient_checkpointing": "gradient_checkpointing", "eval_batch_size": "eval_rows"}
"""Settings that a plan may add, each with the attribute of the job that it sets."""
_ACCELERATES_NAMES = {"deepspeed": "DEEPSPEED", "fsdp": "FSDP", "ddp": "MULTI_GPU"}


@dataclasses.dataclass(frozen=True)
class Refused:
    """A launch file that cannot run the job, and why."""

    name: str
    problem: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The predictions for a run under one launch file."""

    name: str
    file: Path
    job: Job  # with the smallest forward that must fit
    estimate: Estimate
    speed: Speed  # with the largest forward
    over: tuple[str, ...] = ()  # memories that are too small: `device`, `host` or both
    largest_tokens: int = 0  # of the largest forward that fits (up to a rank's part of a step); 0 if none fits
    tight: bool = False  # it fits, but fills more than the share `MARGIN` of a memory
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # settings that the plan adds to the user's

    @property
    def fits(self) -> bool:
        return not self.over

    @property
    def flags(self) -> str:
        """`more` as words of a command line."""
        values = [flag_of(name) if value is True else f"{flag_of(name)} {value}" for name, value in self.more.items()]
        return " ".join(values)


def launch_of(file: Path, machine: PlannedMachine) -> Launch:
    """Return the launch of the file: a rank for each GPU of each machine; on CPUs, as many ranks as the file sets."""
    launch = launch_of_yaml(file)
    if machine.gpus:
        launch = launch_of_yaml(file, *sized(launch, machine.gpus * max(launch.machines, 1)))
    return assume_precision(launch, machine.bf16)


def plan(
    name: str, file: Path, job: Job, machine: PlannedMachine, step_tokens: float, row_tokens: float = 0.0
) -> Plan | Refused:
    """Return the plan for a job under its launch. The plan adds gradient checkpointing if the job then fits better or
    is faster, and generates fewer answers in one batch if the job's number does not fit.

    `step_tokens` is a rank's part of an optimizer step; `row_tokens`, the mean length of a row, is for the speed.
    """
    if problem := _problem(job, machine):
        return Refused(name, problem)
    memory = machine.gpu_bytes if machine.gpus else None, machine.host_bytes

    def planned(tried: Job) -> Plan:
        predicted = estimate(tried)
        over = predicted.over(*memory)
        largest = 0 if over else _largest(tried, memory, max(math.ceil(step_tokens), tried.tokens))
        more = {name: getattr(tried, own) for name, own in _ADDED.items() if getattr(tried, own) != getattr(job, own)}
        return Plan(
            name=name,
            file=file,
            job=tried,
            estimate=predicted,
            over=over,
            largest_tokens=largest,
            speed=speed(with_tokens(tried, largest or tried.tokens), step_tokens, machine.gpu, row_tokens),
            tight=not over and _shortage(tried, memory) > 0,
            more=more,
        )

    best = planned(_fewer_answers(job, memory))
    if not job.gradient_checkpointing:
        other = planned(_fewer_answers(dataclasses.replace(job, gradient_checkpointing=True), memory))
        before, after = ((option.over != (), option.tight) for option in (best, other))
        is_faster = other.fits and best.speed.seconds > (1 + ALIKE) * other.speed.seconds
        if after < before or (after == before and is_faster):
            best = other
    return best


def _shortage(job: Job, memory: _Memory) -> int:
    """0 if the job fits with room to spare, 1 if it barely fits, 2 if it does not."""
    predicted = estimate(job)
    return sum(bool(predicted.over(*(size and size * share for size in memory))) for share in (MARGIN, 1))


def _fewer_answers(job: Job, memory: _Memory) -> Job:
    """Return the job with the most answers in a batch that leave room to spare, or at least fit; else `job` itself."""
    rows = [job.eval_rows]
    while rows[-1] > 1:
        rows.append(rows[-1] // 2)
    tried = [dataclasses.replace(job, eval_rows=count) for count in rows]
    return min(tried, key=lambda fewer: _shortage(fewer, memory))  # the first of equals has most answers


def with_tokens(job: Job, tokens: int) -> Job:
    """The job with a forward of `tokens` tokens; length of rows and share of supervised tokens stay the same."""
    share = job.supervised_tokens / max(job.tokens, 1)
    rows, pixels = (round(count * tokens / job.tokens) for count in (job.rows, job.pixels))
    supervised, rows = max(round(tokens * share), 1), max(rows, 1)
    return dataclasses.replace(job, tokens=tokens, supervised_tokens=supervised, rows=rows, pixels=pixels)


def recommended(tried: Sequence[Plan | Refused]) -> tuple[Plan | None, str]:
    """The plan to run, and why: the simplest of the fastest that fit. Plans for one machine are preferred to plans for
    several, and plans with room to spare to plans that barely fit. The plan is None if none fits."""
    plans = [plan for plan in tried if isinstance(plan, Plan)]
    fits = [plan for plan in plans if plan.fits]
    if not fits:
        return None, "no launch file fits"
    fits = [plan for plan in fits if plan.job.launch.machines <= 1] or fits
    roomy = [plan for plan in fits if not plan.tight] or fits
    least = min(plan.speed.seconds for plan in roomy)
    best = min((plan for plan in roomy if plan.speed.seconds <= (1 + ALIKE) * least), key=_simplicity)
    why = "the simplest of the fastest that fit"
    if (machines := best.job.launch.machines) > 1:
        why += f"; it needs {machines} such machines"
    if best.tight:
        why += f"; it leaves less than {1 - MARGIN:.0%} of a memory free, and a prediction may err by as much"
    if simpler := [plan.name for plan in plans if not plan.fits and _simplicity(plan) < _simplicity(best)]:
        why += f"; {', '.join(simpler)} do not fit"
    launch = best.job.launch
    offloads = {launch.offload("param"), launch.offload("optimizer")} != {"none"}
    if best.job.adapter == "none" and not best.job.train_only and offloads:
        why += "; --adapter lora needs far less memory, and with --load-in-4bit even less"
    return best, why


def _simplicity(plan: Plan) -> int:
    return SIMPLEST_FIRST.index(plan.name) if plan.name in SIMPLEST_FIRST else len(SIMPLEST_FIRST)


def _largest(job: Job, memory: _Memory, most: int) -> int:
    """Return the tokens of the largest forward that fits, by bisection from the job's (which fits) to `most` tokens."""
    low, high = job.tokens, max(min(most, MOST_TOKENS), job.tokens)
    while low < high:
        middle = (low + high + 1) // 2
        if estimate(with_tokens(job, middle)).fits(*memory):
            low = middle
        else:
            high = middle - 1
    return low


def _problem(job: Job, machine: PlannedMachine) -> str:
    """Why this launch cannot run the job here; "" if it can."""
    backend = job.launch.backend
    if backend == "megatron":
        return "Megatron-LM is not supported"
    if backend == "fsdp" and not machine.gpus:
        return "FSDP needs GPUs"
    if refused := next(audit_parallelism(job.launch, "the file", batching="auto", micro_batch_size="auto"), None):
        return refused.what.removeprefix("the file: ")
    if not 0 <= job.launch.offload_ratio <= 1:
        return "its offload_optimizer ratio is not a number from 0 to 1"
    if job.launch.sequence_ranks > 1:
        return "memory under sequence parallelism is not predicted"
    name = TENSOR_PARALLEL if job.launch.tensor_ranks > 1 else _ACCELERATES_NAMES.get(backend, "NO")
    return launch_problem(job, name, job.launch.stage, job.launch.offload("optimizer")) or ""
