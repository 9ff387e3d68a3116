"""Computes the bytes of weights, gradients and AdamW's state on each rank's device and in host memory, for DeepSpeed
0.19.8, DDP and FSDP2. The formulas follow these libraries' code, and were checked by benchmarks/plan_accuracy.py.

P is the number of all parameters, T of the trained ones, N of the ranks; e is the bytes of one element in the computing
type. Where DeepSpeed's own estimators give different numbers, a docstring says why.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from accel_sft.memory.job import Job, pinned

MASTER, MOMENTS, FLOAT32, AVERAGE = 4, 8, 4, 4
"""Bytes per trained parameter: its float32 copy, AdamW's two moments, its gradient in float32 for AdamW, and its
average (`--ema-decay`)."""
_TRAINERS_BUCKET, _ZERO_BUCKET = 2e8, 5e8
"""Elements of a reduce bucket: the number set by launch/accelerator.py for stages 1 and 2, and DeepSpeed's default."""
_MAX_LIVE, _PREFETCH, _SUB_GROUP = 1e9, 5e7, 1e9
"""DeepSpeed's defaults at stage 3, in elements."""
_SWAP_BUFFERS = 5 * 1e8
"""Elements of the buffers through which parameters go to NVMe (buffer_count and buffer_size of offload_param)."""


@dataclasses.dataclass
class Placed:
    """One rank's bytes in one place (device or host), between two forwards unless an attribute says otherwise.

    Attributes:
        weights: the weights that forwards compute with, or a shard of them; `master`: float32 copies of trained ones.
        moments: AdamW's moments, from the first step on; `averages`: those of `--ema-decay`.
        held: gradients that outlive the update (DDP's buckets, offloaded partitions).
        gradients: gradients of one step at the end of its last backward, besides `held`.
        in_flight: the largest tensor's gradient, before it is moved to where gradients are kept.
        update: further gradients while the optimizer steps: copies, casts, flattened ones.
        gathered: whole weights that a forward or backward has gathered or cast.
        buffers: buffers for exchange, staging and swapping, and the rounding of pinned host memory.
    """

    weights: float = 0.0
    master: float = 0.0
    moments: float = 0.0
    averages: float = 0.0
    held: float = 0.0
    gradients: float = 0.0
    in_flight: float = 0.0
    update: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0

    def plus(self, other: "Placed") -> "Placed":
        fields = (field.name for field in dataclasses.fields(self))
        return Placed(**{name: getattr(self, name) + getattr(other, name) for name in fields})


def placed(job: Job) -> tuple[Placed, Placed]:
    """What a rank keeps on its device, and what it keeps in host memory; on a CPU, both are the same memory."""
    if job.launch.backend == "fsdp":
        device, host = _fsdp(job)
    elif job.launch.backend != "deepspeed":
        device, host = _data_parallel(job), Placed()
    else:
        device, host = {0: _stage_0, 1: _stages_1_and_2, 2: _stages_1_and_2, 3: _stage_3}[job.launch.stage](job)
    if job.ema_decay is not None:  # averages are kept with what the optimizer updates: float32 copies, or the weights
        if device.master or host.master:
            device.averages, host.averages = (AVERAGE * place.master / MASTER for place in (device, host))
        else:
            place = host if job.launch.offload("optimizer") != "none" else device
            place.averages = AVERAGE * job.trained / (job.launch.shard_ranks if job.launch.backend == "fsdp" else 1)
    return device, host


def least_bytes(job: Job) -> tuple[float, float]:
    """Lower bounds of a rank's bytes on its device and on the host: the model states; with `--train-only` the weights
    alone."""
    device, host = placed(job)
    if job.train_only is not None:
        return device.weights, host.weights
    on_device, in_host = (p.weights + p.master + p.moments + p.averages + p.held for p in (device, host))
    return on_device, in_host


def update_bytes(job: Job) -> float:
    """Bytes, without activations, that a prepared model's first update will still allocate on a rank's device; DDP's
    buckets exist already."""
    device, _ = placed(job)
    largest = FLOAT32 * min(job.shape.largest_tensor, job.trained) / job.launch.tensor_ranks
    size = device.gradients + max(device.in_flight, device.update, largest)
    if job.launch.backend == "deepspeed":
        size += device.held + (device.buffers if job.launch.stage in (1, 2) else 0.0)
    return size + device.moments


def weights_bytes(job: Job) -> float:
    """Bytes of the whole model as it is loaded; an adapter's weights are float32 unless DeepSpeed casts them."""
    adapter = job.trained if job.is_frozen else 0
    e = job.computes_bytes if job.launch.backend == "deepspeed" else 4
    return job.weights_bytes(job.loaded_bytes) + (e - job.loaded_bytes) * adapter


def _data_parallel(job: Job) -> Placed:
    """One process, or DDP, whose buckets hold the gradients; under tensor parallelism, a rank's part of the model."""
    cut = job.launch.tensor_ranks
    trained, several = job.trained / cut, job.ranks > 1 and cut == 1
    itemsize = FLOAT32 if job.is_frozen else job.loaded_bytes
    cast = job.computes_bytes * trained if job.autocast and itemsize == 4 else 0
    gradients = itemsize * trained
    return Placed(
        weights=weights_bytes(job) / cut,
        moments=job.moments_bytes(itemsize) / cut,
        held=gradients if several else 0,
        gradients=0 if several else gradients,
        gathered=cast,
    )


def _stage_0(job: Job) -> tuple[Placed, Placed]:
    """DeepSpeed without sharding. In half precision all gradients are cast to float32 for the update."""
    trained, e = job.trained, job.computes_bytes
    flat = min(trained, _zero(job, "reduce_bucket_size", _ZERO_BUCKET))
    return Placed(
        weights=job.weights_bytes(e),
        master=MASTER * trained if e < 4 else 0,
        moments=MOMENTS * trained,
        gradients=e * trained,
        update=FLOAT32 * (trained if e < 4 else flat),
    ), Placed()


def _stages_1_and_2(job: Job) -> tuple[Placed, Placed]:
    """Gradients are reduced through a bucket. At stage 2 in bf16, a rank keeps its part of the gradients flat in
    float32: 16T/N bytes in all (18T/N in DeepSpeed's estimator). Otherwise it keeps its part in the computing type, and
    flattens and casts it for the update: 20T/N. Stage 1 keeps whole gradients until those of the last micro-batch are
    reduced, unless exchange and backward overlap."""
    trained, e, share = job.trained, job.computes_bytes, job.trained / job.ranks
    bucket = _zero(job, "reduce_bucket_size", _TRAINERS_BUCKET)
    overlaps = not job.on_cpu and bool(_zero(job, "overlap_comm", True))
    # on a CPU, the unwritten part of a bucket takes no memory
    buffers = e * (min(bucket, trained) if job.on_cpu else bucket * (1 + overlaps))
    largest = e * min(job.shape.largest_tensor, trained)
    gradients_unsharded = job.launch.stage == 1 and not overlaps
    device = Placed(weights=job.weights_bytes(e), buffers=buffers)
    if job.launch.offload("optimizer") == "none":
        device.master, device.moments = MASTER * share, MOMENTS * share
        device.gradients, device.in_flight = job.sums_bytes * (trained if gradients_unsharded else share), largest
        device.update = 0.0 if job.launch.sums_in_float32 else e * share + FLOAT32 * share
        return device, Placed()
    device.in_flight = largest
    device.buffers += largest
    host = Placed(master=MASTER * share, moments=MOMENTS * share, held=FLOAT32 * share + e * share)
    host.buffers = e * share + largest
    if _pins(job, "optimizer"):  # the matrices' part of weights, gradients and their copy in the computing type
        host.buffers += _rounded_up(MASTER * share, FLOAT32 * share, e * share, largest)
        host.buffers += e * share * (job.rounding(e) - 1)  # each parameter's gradient
    return device, host


def _stage_3(job: Job) -> tuple[Placed, Placed]:
    """Parameters are sharded; those that are used again within `stage3_max_reuse_distance` stay gathered."""
    trained, e, n = job.trained, job.computes_bytes, job.ranks
    share = trained / n
    bucket = _zero(job, "reduce_bucket_size", _ZERO_BUCKET)
    live = min(job.parameters, live_parameters(job))
    sub_group = min(share, _zero(job, "sub_group_size", _SUB_GROUP))
    device = Placed(gathered=e * live, buffers=e * (min(bucket, trained) if job.on_cpu else bucket))
    device.in_flight = e * min(job.shape.largest_tensor, trained)
    host = Placed()
    param, optimizer = (job.launch.offload(what) for what in ("param", "optimizer"))
    weights = e * job.parameters / n
    if param == "none":
        device.weights = weights
    elif param == "cpu":
        host.weights = weights
        host.buffers += _rounded_up(e * share) if _pins(job, "param") else 0.0
    else:
        host.buffers += e * min(_SWAP_BUFFERS, job.parameters)
    states = {"master": MASTER * share, "moments": MOMENTS * share, "held": job.sums_bytes * share}
    if optimizer == "none":
        cast = 0 if job.launch.sums_in_float32 else FLOAT32
        device = device.plus(Placed(**states, update=(job.sums_bytes + cast) * sub_group))
    elif optimizer == "cpu":
        stays = _stays(job, share)
        off = share - stays
        host = host.plus(Placed(master=MASTER * off, moments=MOMENTS * off, held=job.sums_bytes * share))
        host.gradients = FLOAT32 * off
        if _pins(job, "optimizer"):
            most = min(off, sub_group)
            host.buffers += _rounded_up(job.sums_bytes * share) + off / max(most, 1) * _rounded_up(FLOAT32 * most)
        device = device.plus(Placed(master=MASTER * stays, moments=MOMENTS * stays, held=FLOAT32 * stays))
        device.update = FLOAT32 * min(stays, sub_group)  # for torch's AdamW: the square root of a sub-group
    else:
        host = host.plus(Placed(held=job.sums_bytes * share, buffers=(MASTER + MOMENTS + FLOAT32) * sub_group))
    return device, host


def _stays(job: Job, share: float) -> float:
    """Number of elements of a rank's part that Twin-Flow updates on the device: those of whole sub-groups. All
    one-dimensional parameters together form one sub-group."""
    if job.on_cpu:  # the host's Adam steps everything
        return 0.0
    size = _zero(job, "sub_group_size", _SUB_GROUP)
    groups = math.ceil(share / size) + (not job.is_frozen)
    return min(int((1 - job.launch.offload_ratio) * groups) * size, share)


def live_parameters(job: Job) -> float:
    """Maximum number of elements that stage 3 keeps gathered at a time. The distance from a layer's forward to its
    backward counts the layers after it twice, so half of `stage3_max_reuse_distance` stays gathered; with gradient
    checkpointing, a third."""
    reuse = _zero(job, "stage3_max_reuse_distance", _MAX_LIVE)
    passes = 3 if job.gradient_checkpointing else 2
    reused = reuse / passes + job.shape.largest_block + _zero(job, "stage3_prefetch_bucket_size", _PREFETCH)
    ends = job.shape.vocab_size * job.shape.hidden_size
    return max(reused, ends + job.shape.largest_block)


def _fsdp(job: Job) -> tuple[Placed, Placed]:
    """FSDP2: every rank keeps a shard. A block is gathered in the computing type, together with the next block. Its
    gradient and the head's (`in_flight`) are exchanged in float32. The head stays gathered from its forward on."""
    n, e, trained = job.launch.shard_ranks, job.computes_bytes, job.trained
    itemsize = FLOAT32 if job.is_frozen else job.loaded_bytes
    block, head = job.shape.largest_block, job.shape.vocab_size * job.shape.hidden_size
    states = Placed(
        weights=weights_bytes(job) / n,
        moments=job.moments_bytes(itemsize) / n,
        gradients=itemsize * trained / n,
    )
    working = Placed(gathered=e * (head + 2 * block), gradients=(e + FLOAT32) * min(block, trained))
    working.in_flight = 0.0 if job.is_frozen else FLOAT32 * head
    if str((job.launch.yaml.get("fsdp_config") or {}).get("fsdp_reshard_after_forward", True)).lower() == "false":
        working.gathered = e * job.parameters
    if job.launch.offload("param") == "none":
        return working.plus(states), Placed()
    # each parameter's shard is pinned, and so is its gradient
    states.buffers = states.weights * (job.rounding(weights_bytes(job) / job.parameters / n) - 1)
    states.buffers += states.gradients * (job.rounding(itemsize / n) - 1)
    return working, states


def _pins(job: Job, what: str) -> bool:
    """Whether DeepSpeed pins the host memory of the offloaded `optimizer` or `param` (launch/accelerator.py)."""
    own = job.launch.zero.get(f"offload_{what}") or {}
    return not job.on_cpu and own.get("pin_memory", True) is not False


def _rounded_up(*sizes: float) -> float:
    """Bytes by which pinned blocks of host memory are larger than their content."""
    return sum(pinned(size) - size for size in sizes)


def _zero(job: Job, key: str, default: Any) -> float:
    """A number in the DeepSpeed JSON, or `default` without it; for `auto`, Accelerate's value from the hidden size."""
    zero: Mapping[str, Any] = job.launch.zero
    value, hidden = zero.get(key, default), job.shape.hidden_size
    if value == "auto":
        filled = {"reduce_bucket_size": hidden**2, "stage3_prefetch_bucket_size": 0.9 * hidden**2}
        return float(filled.get(key, default))
    return float(value)
