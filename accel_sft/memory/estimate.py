"""Predicts a job's memory by phase and component in closed form: without measuring anything, and without torch.

On a GPU, the allocator reuses freed memory, so a phase needs as much as it holds at its peak. On a CPU, the trainer
makes glibc keep freed blocks of up to 32 MiB (launch/environment.py): memory that a forward, the building of an
engine or an exchange took once stays resident, and the phases add up. benchmarks/plan_accuracy.py measured what stays.
"""

import dataclasses
from collections.abc import Mapping

from accel_sft.memory.activations import PIXEL, forward_bytes, logits_bytes, peak_bytes, tower_bytes
from accel_sft.memory.job import Job
from accel_sft.memory.states import AVERAGE, FLOAT32, Placed, placed, weights_bytes

GIB = 2**30
CHECKPOINT_BYTES = 12
"""Maximum bytes per trained parameter in a checkpoint: for the weight and AdamW's two moments, in float32."""
FILE_BYTES = 2**30
"""Size above which a checkpoint file gets no further tensor; about as much is copied to host memory at a time."""
CUDA_BYTES = GIB
"""Assumed bytes of a GPU's memory outside of torch's allocator: half for the CUDA context, and half for an NCCL group,
which took 0.53 to 0.67 GiB on A100s (NVIDIA/nccl issue 964)."""
GAPS = 0.08
"""Share of a step's transient memory that torch's GPU allocator loses to gaps and rounding, with expandable segments
on. Without such segments, other people measured 0.08 to 0.41."""
PROCESS_BYTES = {"ddp": 1.5 * GIB, "deepspeed": 1.7 * GIB}
"""Resident bytes of a GPU's rank before its model is loaded, by backend: Python, torch, CUDA's libraries."""
CPU_BYTES = 0.4 * GIB
"""Resident bytes of a CPU's rank before its model is loaded."""
IMAGES_BYTES = 0.1 * GIB
"""Resident bytes that an image processor adds to a rank's memory, besides two copies of a forward's pixel values."""
GROWTH_BYTES = 0.24 * GIB
"""Bytes by which a CPU's rank grows until its first step has ended: imports, compiled code, caches, the heap's gaps."""
HEAP = 1.3
"""Bytes that a forward and its backward leave in a CPU's heap, as a multiple of those that the forward keeps."""
LEFT_IN_HEAP = {"ddp": 2.5, 0: 0.5, 1: 4.0, 2: 4.0, 3: 6.5}
"""Bytes that a CPU's heap and collectives keep, by backend or ZeRO stage: per trained parameter at stages 1 and 2, else
per parameter. DDP's first buckets, weights before sharding, gathered weights and exchange buffers used these bytes."""
PHASES = ("load", "shard", "first_step", "step", "evaluate", "save", "export")
"""Phases of a run, in order. `first_step` is from the first forward to the first update; `step` is any later step."""
WITH_COPY = ("step", "evaluate", "save", "export")
"""Phases in which host memory has copies of the run's state and of the best weights, written in the background."""
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""Parts of a rank's memory. `buffers`: communication buckets, gathered weights, copies for a disk or another device,
freed memory that the heap keeps; `overhead`: the process, its libraries, the CUDA context, a GPU allocator's gaps."""

Memory = Mapping[str, Mapping[str, float]]
"""phase -> component -> bytes. A missing phase or component was not estimated; a component without memory is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The most memory that a rank of a job takes at any moment of each phase.

    Attributes:
        device: memory of one rank's accelerator; {} if ranks train on the CPU.
        host: resident memory of one rank's process, shared pages included.
        spare_bytes: host memory that a rank can do without in the phases WITH_COPY; training then waits while
            checkpoints are written file by file.
        notes: what the numbers leave out.
    """

    device: Memory
    host: Memory
    spare_bytes: float = 0.0
    local_ranks: int = 1
    notes: tuple[str, ...] = ()

    @property
    def device_peak_bytes(self) -> float:
        return max(totals(self.device).values(), default=0.0)

    @property
    def host_peak_bytes(self) -> float:
        """Bytes of the largest phase on one machine, summed over its ranks."""
        return self.local_ranks * max(totals(self.host).values(), default=0.0)

    @property
    def host_needed(self) -> dict[str, float]:
        """Bytes of each phase in one rank's host memory, without `spare_bytes`."""
        return {phase: size - self.spare_bytes * (phase in WITH_COPY) for phase, size in totals(self.host).items()}

    @property
    def host_needed_bytes(self) -> float:
        """`host_peak_bytes` without `spare_bytes`: with less host memory, the job does not fit."""
        return self.local_ranks * max(self.host_needed.values(), default=0.0)

    def fits(self, gpu_memory: float | None, host_memory: float | None) -> bool:
        """Whether the job fits into these bytes of each accelerator and of each machine; None means no limit."""
        return not self.over(gpu_memory, host_memory)

    def over(self, gpu_memory: float | None, host_memory: float | None) -> tuple[str, ...]:
        """The names of the memories that are too small: `device`, `host`, both or none."""
        places = ("device", self.device_peak_bytes, gpu_memory), ("host", self.host_needed_bytes, host_memory)
        return tuple(name for name, needed, room in places if room is not None and needed > room)


def totals(memory: Memory) -> dict[str, float]:
    """Bytes of each phase, in the order of PHASES."""
    return {phase: sum(memory[phase].values()) for phase in PHASES if phase in memory}


def estimate(job: Job) -> Estimate:
    """Predict the memory of a job's ranks, or raise UserError if its adapter's target modules are not in the model."""
    part = dataclasses.replace(job, shape=job.shape.cut(job.launch.tensor_ranks))
    device, host = placed(job)
    if job.on_cpu:
        on_device, in_host = {}, _on_cpu(job, device.plus(host), part)
    else:
        on_device, in_host = _on_gpu(job, device, part), _beside_gpu(job, host)
    copy, best = _copied_bytes(job), _exported_bytes(job) if job.eval_rows else 0.0  # best/
    for phase in in_host.keys() & set(WITH_COPY):
        in_host[phase] = _add(in_host[phase], buffers=copy + best)
    left_out = {
        "the updated weights that DoRA computes for each layer": job.use_dora,
        "a layer's dequantized weights": job.load_in_4bit,
        "the attention scores that Gemma 2 keeps": job.shape.family == "gemma2",
    }
    notes = [f"{part} are not in the estimate; compare measures them" for part, applies in left_out.items() if applies]
    return Estimate(
        device=on_device,
        host=in_host,
        spare_bytes=max(copy - _file_bytes(job), 0.0) + best,
        local_ranks=job.local_ranks,
        notes=tuple(notes),
    )


def _phase(overhead: float, **sizes: float) -> dict[str, float]:
    return {**dict.fromkeys(COMPONENTS, 0.0), **sizes, "overhead": overhead}


def _add(to: Mapping[str, float], **more: float) -> dict[str, float]:
    return {**to, **{name: to[name] + size for name, size in more.items()}}


def _resident(states: Placed, overhead: float, *, moments: bool = True) -> dict[str, float]:
    """A phase's memory with only what is kept between two forwards; before the first update, without `moments`."""
    optimizer = states.master + states.averages + (states.moments if moments else 0)
    sizes = {"weights": states.weights, "gradients": states.held, "optimizer": optimizer, "buffers": states.buffers}
    return _phase(overhead, **sizes)


def _after_training(job: Job, base: Mapping[str, float], evaluate: float, export: float) -> dict[str, dict[str, float]]:
    """The phases after a step; `evaluate` and `export` are the bytes of the buffers in these two phases."""
    phases = {"evaluate": _add(base, buffers=evaluate)} if job.eval_rows else {}
    if job.saves:
        phases["save"] = dict(base)
    return phases | {"export": _add(base, buffers=export)}


def _on_gpu(job: Job, states: Placed, part: Job) -> dict[str, dict[str, float]]:
    """Memory of a GPU; `part` is the job with a rank's part of the model."""
    before, after = (_resident(states, CUDA_BYTES, moments=moments) for moments in (False, True))
    # FSDP frees the reduced gradient of the embedding only at the next backward's first block, after the head
    late = states.in_flight if job.launch.backend == "fsdp" else 0.0
    gathered = 0.0 if job.autocast else states.gathered
    gradients = states.gradients if job.launch.backend != "deepspeed" or job.launch.stage else 0.0
    backward = _add(after, **peak_bytes(part), buffers=gathered, gradients=gradients + late)
    update = _add(after, gradients=states.gradients + states.update)
    most = max(backward, update, key=lambda phase: sum(phase.values()))
    step = _add(most, overhead=GAPS * max(sum(most.values()) - sum(after.values()), 0.0))
    is_sharded = job.launch.stage == 3
    phases = {
        "load": _phase(CUDA_BYTES, weights=states.weights if is_sharded else 0.0),
        "shard": before,
        "first_step": step,  # the moments exist only from its update on
        "step": step,
        **_after_training(job, after, states.gathered, states.gathered if is_sharded else 0.0),
    }
    if job.eval_rows:
        phases["evaluate"]["activations"] = _generating_bytes(job)
    return phases


def _beside_gpu(job: Job, states: Placed) -> dict[str, dict[str, float]]:
    """Host memory of a rank whose model trains on a GPU."""
    base = PROCESS_BYTES["deepspeed" if job.launch.backend == "deepspeed" else "ddp"]
    loading, after = loading_bytes(job), _resident(states, base)
    step = _add(after, gradients=states.gradients + states.update)
    return {
        "load": _phase(base, weights=loading),
        "shard": _add(_resident(states, base, moments=False), weights=max(loading - states.weights, 0.0)),
        "first_step": step,
        "step": step,
        **_after_training(job, after, 0.0, 0.0 if job.eval_rows else _exported_bytes(job)),
    }


def _on_cpu(job: Job, states: Placed, part: Job) -> dict[str, dict[str, float]]:
    """Memory of a rank that trains on a CPU; `states` is the sum of device and host, which are the same memory here."""
    start = CPU_BYTES + (IMAGES_BYTES + 2 * PIXEL * job.pixels if job.pixels else 0)
    converts = job.loaded_bytes != job.stored_bytes
    loaded = (job.loaded_bytes + job.stored_bytes) * job.shape.parameters if converts else 0
    left = LEFT_IN_HEAP[job.launch.stage if job.launch.backend == "deepspeed" else "ddp"]
    left *= job.trained if job.launch.stage in (1, 2) else job.parameters
    of_tower, in_tower = tower_bytes(job)  # without a backward, a frozen tower's memory is not reused
    after = _resident(dataclasses.replace(states, buffers=left), start + GROWTH_BYTES)
    activations = HEAP * forward_bytes(part) + in_tower - of_tower
    after = _add(after, activations=activations, logits=HEAP * logits_bytes(part))
    exchange = states.buffers + states.gathered
    backward = _add(after, gradients=states.gradients + states.in_flight, buffers=exchange)
    update = _add(after, gradients=states.gradients + states.update)
    most = max(backward, update, key=lambda phase: sum(phase.values()))
    return {
        "load": _phase(start, weights=loaded),
        "shard": _resident(dataclasses.replace(states, buffers=0.0), start, moments=False),
        "first_step": _add(most, optimizer=-states.moments / 2),  # moments take blocks that the first backward freed
        "step": most,
        **_after_training(job, after, states.gathered, 0.0),
    }


def _generating_bytes(job: Job) -> float:
    """Bytes of the KV cache of all answers generated in one batch, and of their next tokens' logits."""
    shape, e = job.shape, job.computes_bytes
    length = job.eval_tokens or max(job.tokens // max(job.rows, 1), 1)
    cache = 2 * shape.layers * shape.key_value_heads * shape.head_dim * e * length / job.launch.tensor_ranks
    return job.eval_rows * (cache + shape.vocab_size * (4 + e))


def loading_bytes(job: Job) -> float:
    """Lower bound of the bytes of host memory that a GPU's rank takes while it loads the weights. Memory-mapped files
    count as page cache. Converted weights need memory, unless ZeRO-3 shards them while they are read."""
    converts = job.loaded_bytes != job.stored_bytes and job.launch.stage < 3
    return weights_bytes(job) / job.launch.tensor_ranks if converts else 0.0


def _file_bytes(job: Job) -> float:
    """Bytes of one checkpoint file."""
    of_parameter = checkpoint_bytes_each(job.ema_decay is not None)
    return min(of_parameter * job.trained / job.ranks, FILE_BYTES + of_parameter * job.shape.largest_tensor)


def _copied_bytes(job: Job) -> float:
    """Bytes of a rank's copy of its part of a checkpoint; it stays in host memory after the first checkpoint."""
    if not job.saves:
        return 0.0
    of_parameter, ranks = checkpoint_bytes_each(job.ema_decay is not None), job.ranks
    if job.launch.backend == "fsdp":
        ranks = job.launch.shard_ranks  # under HSDP, only the ranks of the first model copy write
    largest = 0 if job.launch.stage or job.launch.shards_weights else min(job.shape.largest_tensor, job.trained)
    size = of_parameter * (largest + (job.trained - largest) / ranks)  # one rank writes a tensor that all ranks hold
    if job.launch.offload("optimizer") != "none":
        return size
    return size * job.rounding(FLOAT32 / (ranks if job.launch.shards_weights else 1))  # a GPU copies to pinned memory


def _exported_bytes(job: Job) -> float:
    """Bytes of rank 0's copy of the weights, from which best/ is written, divided by the machine's ranks."""
    return job.loaded_bytes * (job.trained if job.is_frozen else job.shape.parameters) / job.local_ranks


def checkpoint_bytes_each(averaged: bool) -> int:
    """Maximum bytes of a checkpoint per trained parameter."""
    return CHECKPOINT_BYTES + AVERAGE * averaged
