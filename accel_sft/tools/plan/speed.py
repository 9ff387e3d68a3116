"""What a step sends between ranks and to the host, and about how long it takes: to compare launch files with.

Compute is 6 operations a weight and token, 2 of them for the weights' gradients, which an adapter saves, and 2 more
where activations are computed again; a forward costs besides what 1,024 tokens do, as batching/autotune.py assumes.
What is sent takes its time at the rates below, of PCIe 4.0, half of it behind the computing where ranks exchange
gradients. Only ratios between launch files mean anything.
"""

import dataclasses
import math

from accel_sft.memory.job import Job
from accel_sft.memory.states import live_parameters

OPERATIONS = 1.5e14
"""A GPU's a second in half precision, as training reaches them."""
LINK, HOST_LINK, DISK = 12e9, 10e9, 3e9
"""Bytes a second between GPUs, to the host and to NVMe."""
NETWORK = 3e9
"""Bytes a second of one GPU between machines."""
HOST_UPDATES = 5e8
"""Parameters that DeepSpeed's CPU Adam updates a second on one rank."""
FORWARD_TOKENS = 1024
HIDDEN_SHARE = 0.5


@dataclasses.dataclass(frozen=True)
class Speed:
    """Of one optimizer step on one rank.

    Attributes:
        sent_bytes: to other ranks.
        host_bytes: between GPU and host, or disk.
        seconds: about; only its ratio to another launch's counts.
        forwards: how many forwards the rank makes.
    """

    sent_bytes: float
    host_bytes: float
    seconds: float
    forwards: int


def speed(job: Job, step_tokens: float) -> Speed:
    """Of a step of so many tokens on a rank, in forwards of `job.tokens`."""
    forwards = max(math.ceil(step_tokens / max(job.tokens, 1)), 1)
    shape, launch = job.shape, job.launch
    passes = 6 - 2 * job.is_frozen + 2 * job.gradient_checkpointing
    compute = passes * shape.active_parameters * (step_tokens + forwards * FORWARD_TOKENS) / OPERATIONS
    sent = _sent_bytes(job, forwards)
    link = NETWORK if launch.machines > 1 else LINK
    host, update = _host_bytes(job, forwards), 0.0
    disk = launch.offload("optimizer") == "nvme" or launch.offload("param") == "nvme"
    if launch.offload("optimizer") != "none":
        update = job.trained / launch.shard_ranks / HOST_UPDATES
    exposed = sent / link * (1 - HIDDEN_SHARE)
    return Speed(sent, host, compute + exposed + host / (DISK if disk else HOST_LINK) + update, forwards)


def _sent_bytes(job: Job, forwards: int) -> float:
    """A ring sends each byte that is gathered or scattered (N - 1) / N times, and twice to reduce for all ranks."""
    n, e, trained, launch = job.ranks, job.computes_bytes, job.trained, job.launch
    once, backend, stage = (n - 1) / n, launch.backend, launch.stage
    if backend == "fsdp":  # and under HSDP copies average the gradients of their shards
        shard, copies = launch.shard_ranks, n // launch.shard_ranks
        gathered = (shard - 1) / shard * forwards * (2 * e * job.parameters + 4 * trained)
        return gathered + 2 * (copies - 1) / copies * forwards * 4 * trained / shard
    if backend != "deepspeed":
        return 2 * once * 4 * trained
    if stage == 0:
        return 2 * once * e * trained
    if stage < 3:  # gathered weights once a step; DeepSpeed reduces for all ranks, at stage 2 after each forward
        reduced = forwards if stage == 2 else 1
        return once * e * trained * (2 * reduced + 1)
    return once * forwards * (e * _gathered(job) + e * trained)


def _gathered(job: Job) -> float:
    """Elements gathered for one forward and backward: what the backward finds still there is not gathered again."""
    again = max(job.parameters - live_parameters(job), 0.0) * (1 + job.gradient_checkpointing)
    return job.parameters + again


def _host_bytes(job: Job, forwards: int) -> float:
    """Gradients down and weights up for an optimizer on the host; the shards of parameters on it; state on a disk."""
    n, e, trained, launch = job.ranks, job.computes_bytes, job.trained, job.launch
    if launch.backend == "fsdp" and launch.offload("param") != "none":  # float32 shards up twice, gradients down
        return forwards * 4 * (2 * job.parameters + trained) / launch.shard_ranks
    found = 0.0
    if launch.offload("optimizer") != "none":
        found += (forwards + 1) * e * trained / n
    if launch.offload("optimizer") == "nvme":
        found += 2 * 16 * trained / n
    if launch.offload("param") != "none":
        found += forwards * e * _gathered(job) / n
    return found
