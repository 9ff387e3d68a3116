"""Estimates what a step sends between ranks and to the host, and how long the step takes, to compare launch files.

Compute time is the model's FLOPs (plus a second forward if gradient checkpointing is on) at a fraction of peak speed.
Each forward adds a fixed cost: the time of 1,024 tokens, as batching/choice.py assumes. The time for sending follows
from the device's links; half of the exchange between ranks overlaps with computing. On CPUs an offload moves nothing:
under any launch, weights and optimizer are on the host. Only ratios between launch files mean anything;
docs/planning.md compares them with published runs.
"""

import dataclasses
import math

from accel_sft.launch.info import Launch
from accel_sft.memory.flops import Peaks, model_flops, peaks
from accel_sft.memory.job import Job
from accel_sft.memory.states import live_parameters

UNKNOWN = Peaks(bf16=375, fp16=375, tf32=188, fp32=90)
"""Assumptions for a GPU that flops.py does not know: a data-centre GPU on PCIe 4.0."""
REACHED = 0.4
"""Share of the peak that computing reaches with transformers' unchanged modules."""
COMPILED = 1.15
"""How many times as fast `--compile` computes: published runs gain 10 to 16% from torch.compile."""
CPU_OPERATIONS, CPU_LINK = 1e11, 2e9
"""FLOP/s of a rank on a few CPU cores with AVX2, and bytes per second between two such ranks through gloo."""
DISK, NETWORK = 3e9, 3e9
"""Bytes per second to NVMe, and from one GPU to other machines."""
HOST_UPDATES = 5e8
"""Parameters per second that DeepSpeed's CPU Adam updates on one rank."""
EXCHANGE_SECONDS, CPU_EXCHANGE_SECONDS = 3e-5, 1e-3
"""Minimum seconds of an exchange between ranks, by NCCL and by gloo."""
FORWARD_TOKENS = 1024
"""The fixed cost of one forward, expressed as the number of tokens whose computation takes as long."""
HIDDEN_SHARE = 0.5
"""Share of the exchange between ranks that overlaps with computing."""


@dataclasses.dataclass(frozen=True)
class Speed:
    """The cost of one optimizer step on one rank: bytes sent to other ranks, bytes moved between GPU and host or disk,
    and a rough time, meaningful only relative to another launch's."""

    sent_bytes: float
    host_bytes: float
    seconds: float
    forwards: int


def speed(job: Job, step_tokens: float, gpu: str = "", row_tokens: float = 0.0) -> Speed:
    """What a step of `step_tokens` tokens, in forwards of `job.tokens` tokens, costs a rank. `gpu` is the device's
    name, "" if it is not known. `row_tokens` sets the cost of attention; with 0, this cost is left out."""
    forwards = max(math.ceil(step_tokens / max(job.tokens, 1)), 1)
    launch, device = job.launch, peaks(gpu) or UNKNOWN
    learnt = job.supervised_tokens / max(job.tokens, 1)
    flops = model_flops(job).total(1, learnt, row_tokens / 2)  # per token
    if job.gradient_checkpointing:
        flops += model_flops(dataclasses.replace(job, adapter="none")).total(1, 0, row_tokens / 2) / 3
    split = 1 if job.on_cpu else launch.tensor_ranks  # on CPUs, a part of a narrow product takes as long as the whole
    rate = (getattr(device, job.precision, None) or device.fp32) * 1e12 * REACHED * (COMPILED if job.compile else 1)
    link, host_link = device.link * 1e9, device.host_link * 1e9
    if job.on_cpu:
        rate, link = CPU_OPERATIONS, CPU_LINK
    if launch.machines > 1:
        link = NETWORK
    sent, host, update = _sent_bytes(job, forwards), 0.0, 0.0
    disk = launch.offload("optimizer") == "nvme" or launch.offload("param") == "nvme"
    if disk or not job.on_cpu:
        host = _host_bytes(job, forwards)
    if launch.offload("optimizer") != "none" and not job.on_cpu:
        update = launch.offload_ratio * job.trained / launch.shard_ranks / HOST_UPDATES
    compute = flops * (step_tokens / split + forwards * FORWARD_TOKENS) / rate  # a forward's fixed cost is not split
    waits = _exchanges(launch, job.shape.layers * forwards) * (CPU_EXCHANGE_SECONDS if job.on_cpu else EXCHANGE_SECONDS)
    exposed = (sent / link + waits) * (1 - HIDDEN_SHARE)
    return Speed(sent, host, compute + exposed + host / (DISK if disk else host_link) + update, forwards)


def _exchanges(launch: Launch, layers: int) -> int:
    """Number of exchanges between ranks in one step; `layers` counts each layer once for each forward of the step."""
    if launch.world_size == 1:
        return 0
    if launch.tensor_ranks > 1:
        return 4 * layers
    return 3 * layers if launch.shards_weights else 1


def _sent_bytes(job: Job, forwards: int) -> float:
    """Bytes that a rank sends in one step. In a ring of N ranks, each byte of a gather or a scatter is sent (N - 1) / N
    times, each byte of an all-reduce twice as often."""
    e, trained, launch = job.computes_bytes, job.trained, job.launch
    once = 1 - 1 / (launch.shard_ranks if launch.backend == "fsdp" else job.ranks)
    if launch.tensor_ranks > 1:  # hidden states after attention and feed-forward, and their gradients before them
        return 2 * once * 4 * job.shape.layers * e * job.shape.hidden_size * job.tokens * forwards
    if launch.shards_weights:  # gathered for forward and backward; FSDP2 scatters gradients in float32
        return once * forwards * (_gathered_bytes(job) + (4 if launch.backend == "fsdp" else e) * trained)
    if launch.backend != "deepspeed":
        return 2 * once * 4 * trained
    # weights are gathered once a step; gradients are all-reduced, at stage 2 after each forward
    gathered = 1 if launch.stage else 0
    return once * e * trained * (2 * (forwards if launch.stage == 2 else 1) + gathered)


def _gathered_bytes(job: Job) -> float:
    """Bytes gathered for one forward and backward; ZeRO-3's backward gathers again only what was released meanwhile."""
    again: float = job.parameters
    if job.launch.backend == "deepspeed":
        again = max(again - live_parameters(job), 0.0) * (1 + job.gradient_checkpointing)
    return job.computes_bytes * (job.parameters + again)


def _host_bytes(job: Job, forwards: int) -> float:
    """Bytes that a rank moves between GPU and host, or disk, in one step: gradients and updated weights, weights for
    each forward, and optimizer state on a disk, which is read and written."""
    e, trained, launch = job.computes_bytes, job.trained / job.ranks, job.launch
    if launch.backend == "fsdp" and launch.offload("param") != "none":  # shards go to the GPU twice, gradients back
        return forwards * 4 * (2 * job.parameters + job.trained) / launch.shard_ranks
    moved = 0.0
    if launch.offload("optimizer") != "none":
        moved += (forwards + 1) * e * trained
    if launch.offload("optimizer") == "nvme":
        moved += 2 * 16 * trained
    if launch.offload("param") != "none":
        moved += forwards * _gathered_bytes(job) / job.ranks
    return moved
