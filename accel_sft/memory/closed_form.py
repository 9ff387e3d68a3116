"""Computes a job's memory by phase and component in closed form: without measuring anything, and without torch."""

import dataclasses
from collections.abc import Iterator, Mapping

from accel_sft.memory.activations import forward_bytes, logits_bytes, peak_bytes
from accel_sft.memory.cpu import on_cpu
from accel_sft.memory.estimate import WITH_COPY, Estimate
from accel_sft.memory.job import Job
from accel_sft.memory.states import AVERAGE, FLOAT32, Placed, placed, weights_bytes

GIB = 2**30
CHECKPOINT_BYTES = 12
"""Maximum number of bytes per trained parameter in a checkpoint: the weight and AdamW's moments, in float32; with
`--ema-decay` its average comes to it."""
FILE_BYTES = 2**30
"""Bytes above which a checkpoint file gets no further tensor; about as many bytes are copied to host memory at once."""

CUDA_BYTES = GIB
"""Bytes of a GPU's memory outside of torch's allocator: the CUDA context, NCCL and the libraries' workspaces. It is an
assumption: half of it is the context's; a group of ranks took 0.53 to 0.67 GiB on A100s (NVIDIA/nccl issue 964)."""
GAPS = 0.08
"""Share of a step's transient memory that torch's GPU allocator loses to gaps and rounding, with expandable segments
on. Others measured 0.08 to 0.41 without such segments."""
PROCESS_BYTES = {"ddp": 1.5 * GIB, "deepspeed": 1.7 * GIB}
"""Resident bytes of a GPU's rank before its model is loaded, by backend: Python, torch, CUDA's libraries."""


def estimate(job: Job) -> Estimate:
    """Predict the memory of a job's ranks.

    Raises:
        UserError: the adapter's target modules are not in the model.
    """
    part = dataclasses.replace(job, shape=job.shape.cut(job.launch.tensor_ranks))
    forward = peak_bytes(part)
    if job.on_cpu:
        forward = {"activations": forward_bytes(part), "logits": logits_bytes(part)}
    found = assemble(job, placed(job), forward)
    return dataclasses.replace(found, notes=tuple(_unknown(job)))


def _unknown(job: Job) -> Iterator[str]:
    """Say what memory this job needs that the closed form leaves out."""
    if job.use_dora:
        yield "DoRA makes the updated weights of a layer whole in each forward: left out, --probe measures them"
    if job.load_in_4bit:
        yield "a layer's weights are made whole for each product, one layer at a time: left out"
    if job.optimizer == "muon":
        yield "Muon's products on one matrix at a time are left out"


def assemble(job: Job, states: tuple[Placed, Placed], forward: Mapping[str, float]) -> Estimate:
    """Combine model states and activations into the phases of a job.

    Args:
        states: what a rank keeps on its device and in host memory.
        forward: bytes of `activations` and `logits`. On a GPU: at the peak of the largest forward and backward, with
            gradients in flight and weights that autocast has cast. On a CPU: everything that is held at some time.
    """
    device, host = states
    on_gpu = {} if job.on_cpu else _on_gpu(job, device, forward)
    copy, best = copied_bytes(job), exported_bytes(job) if job.eval_rows else 0.0  # best/
    beside = on_cpu(job, device.plus(host), forward) if job.on_cpu else _beside_gpu(job, host)
    for phase in beside.keys() & set(WITH_COPY):
        beside[phase] = _add(beside[phase], buffers=copy + best)
    spare = max(copy - _file_bytes(job), 0.0) + best
    return Estimate(method="closed form", device=on_gpu, host=beside, spare_bytes=spare, local_ranks=job.local_ranks)


def _resident(at: Placed, moments: bool) -> dict[str, float]:
    return {
        "weights": at.weights,
        "gradients": at.held,
        "optimizer": at.master + at.averages + (at.moments if moments else 0),
        "activations": 0.0,
        "logits": 0.0,
        "buffers": at.buffers,
        "overhead": 0.0,
    }


def _on_gpu(job: Job, at: Placed, forward: Mapping[str, float]) -> dict[str, dict[str, float]]:
    base = {"overhead": CUDA_BYTES}
    loaded = at.weights if job.launch.stage == 3 else 0.0
    none = dict.fromkeys(_resident(at, False), 0.0)
    phases = {"load": {**none, **base, "weights": loaded}}
    sharded = _resident(at, False) | base
    phases["shard"] = _add(sharded, optimizer=at.sharding)

    gradients, gathered = at.gradients, 0.0 if job.autocast else at.gathered
    exchanged = at.in_flight if job.launch.backend == "fsdp" else 0.0
    of_a_block = (job.computes_bytes + FLOAT32) * min(job.shape.largest_block, job.trained)
    # what FSDP has exchanged last, the embedding's gradient, it keeps until the first exchange of the next backward,
    # which is a block's: through the head's
    kept = max(exchanged - of_a_block, 0.0) if forward["logits"] else 0.0

    def step(moments: bool) -> dict[str, float]:
        resident = _resident(at, True) | base
        backward = _add(
            _resident(at, moments) | base,
            **forward,
            buffers=gathered,
            gradients=gradients + kept if job.launch.backend != "deepspeed" or job.launch.stage else 0.0,
        )
        late = _add(_resident(at, moments) | base, gradients=gradients + exchanged, buffers=gathered)
        # a head that is not tied is exchanged while all activations are held; a tied one after the embedding's backward
        without_head = _add(backward, gradients=exchanged - kept, logits=-forward["logits"])
        behind_head = late if job.shape.tied else without_head
        update = _add(resident, gradients=gradients + at.update)
        most = max((backward, behind_head, late, update), key=lambda each: sum(each.values()))
        came = sum(most.values()) - sum(_resident(at, moments).values()) - CUDA_BYTES
        return _add(most, overhead=GAPS * max(came, 0.0))

    phases["first_step"], phases["step"] = step(False), step(True)
    after = _resident(at, True) | base
    if job.eval_rows:
        phases["evaluate"] = _add(after, activations=_generating_bytes(job), buffers=at.gathered + at.swapping)
    if job.saves:
        phases["save"] = after
    phases["export"] = _add(after, buffers=at.swapping + (at.gathered if job.launch.stage == 3 else 0.0))
    return phases


def _beside_gpu(job: Job, at: Placed) -> dict[str, dict[str, float]]:
    """Host memory of a rank whose model trains on a GPU."""
    backend = "deepspeed" if job.launch.backend == "deepspeed" else "ddp"
    base = {"overhead": PROCESS_BYTES[backend]}
    none = dict.fromkeys(_resident(at, False), 0.0)
    loading = loading_bytes(job)
    phases = {
        "load": {**none, **base, "weights": loading},
        "shard": _add(_resident(at, False) | base, weights=max(loading - at.weights, 0), optimizer=at.sharding),
        "first_step": _add(_resident(at, True) | base, gradients=at.gradients + at.update),
        "step": _add(_resident(at, True) | base, gradients=at.gradients + at.update),
    }
    after = _resident(at, True) | base
    if job.eval_rows:
        phases["evaluate"] = _add(after, buffers=at.swapping)
    if job.saves:
        phases["save"] = after
    phases["export"] = _add(after, buffers=at.swapping + (0.0 if job.eval_rows else exported_bytes(job)))
    return phases


def loading_bytes(job: Job) -> float:
    """Return how many bytes of host memory a rank of a GPU takes while it loads the weights, at least.

    Mapped weight files are page cache, freed when memory is short; converted weights need memory of their own, and
    every rank converts all of them, unless ZeRO-3 shards them as they are read.
    """
    converts = job.loaded_bytes != job.stored_bytes and job.launch.stage < 3
    return weights_bytes(job) / job.launch.tensor_ranks if converts else 0.0


def _generating_bytes(job: Job) -> float:
    """Return the bytes of the KV cache of all answers generated at once, and of their next tokens' logits."""
    shape, e = job.shape, job.computes_bytes
    length = job.eval_tokens or max(job.tokens // max(job.rows, 1), 1)
    cache = 2 * shape.layers * shape.key_value_heads * shape.head_dim * e * length / job.launch.tensor_ranks
    return job.eval_rows * (cache + shape.vocab_size * (4 + e))


def _file_bytes(job: Job) -> float:
    """Bytes of one checkpoint file, which is copied to host memory before it is written."""
    each = checkpoint_bytes_each(job.ema_decay is not None)
    return min(each * job.trained / job.ranks, FILE_BYTES + each * job.shape.largest_tensor)


def copied_bytes(job: Job) -> float:
    """Return the bytes of a rank's copy of what it writes of checkpoints, in host memory from the first one on."""
    if not job.saves:
        return 0.0
    each, ranks = checkpoint_bytes_each(job.ema_decay is not None), job.ranks
    if job.launch.backend == "fsdp":
        ranks = job.launch.shard_ranks  # HSDP's first copy of the model writes all
    largest = 0 if job.launch.stage or job.launch.shards_weights else min(job.shape.largest_tensor, job.trained)
    size = each * (largest + (job.trained - largest) / ranks)  # a tensor that all ranks have whole is written by one
    if job.launch.offload("optimizer") != "none":
        return size
    return size * job.rounding(FLOAT32 / (ranks if job.launch.shards_weights else 1))  # what a GPU copies to is pinned


def exported_bytes(job: Job) -> float:
    """Return the bytes of a rank's copy of the weights that are exported; best/ is written from it behind the steps.

    Rank 0 alone has it: it is divided here, so that the sum over a machine's ranks is right.
    """
    return job.loaded_bytes * (job.trained if job.is_frozen else job.shape.parameters) / job.local_ranks


def checkpoint_bytes_each(averaged: bool) -> int:
    """Bytes of a checkpoint per trained parameter, at most."""
    return CHECKPOINT_BYTES + AVERAGE * averaged


def _add(to: dict[str, float], **more: float) -> dict[str, float]:
    return to | {name: to[name] + size for name, size in more.items()}
