"""Host memory of a rank that trains on a CPU: the states, and what its process, heap and collectives take besides.

The trainer has glibc keep freed blocks of up to 32 MiB (launch/environment.py), so memory that a forward, the building
of an engine or an exchange once took stays resident. Phases therefore add up, while a GPU's allocator would reuse it.
benchmarks/plan_accuracy.py measured what stays. The constants below are fitted to the cases that it calls fitted; it
prints their error on the other cases.
"""

from collections.abc import Mapping

from accel_sft.memory.activations import passing_bytes
from accel_sft.memory.job import Job
from accel_sft.memory.states import Placed
from accel_sft.memory.vision import PIXEL

GIB = 2**30
PROCESS_BYTES = {"deepspeed": 0.412 * GIB, "ddp": 0.387 * GIB}
"""Resident bytes of a rank before its model is loaded: Python, torch and the libraries, which ranks share in part."""
IMAGES_BYTES = 0.1 * GIB
"""Resident bytes that a processor of images adds to it, beside twice the pixel values of a forward."""
GROWTH_BYTES = 0.12 * GIB
"""Bytes by which a rank grows until its first step has ended: imports, compiled code and caches."""
HEAP = 1.3
"""What a forward and its backward leave in the heap, as a multiple of what the forward keeps: more than 1, because the
gradients of activations come on top, and a freed block does not fit every later request."""
KEPT_FULL = {
    "ddp": (0.04, 3.0),
    0: (0.08, 0.5),
    1: (0.12, 3.6),
    2: (0.12, 3.6),
    3: (0.16, 8.0),
    "offload": (0.13, 4.6),
    "offload 3": (0.20, 6.5),
}
KEPT_ADAPTER = {
    "ddp": (0.10, 3.0),
    0: (0.06, 0.4),
    1: (0.11, 0.45),
    2: (0.11, 0.45),
    3: (0.50, 2.7),
    "offload": (0.11, 0.45),
    "offload 3": (0.42, 2.4),
}
"""What heap and collectives keep, in GiB and in bytes per parameter, by backend or ZeRO stage: KEPT_FULL if all weights
are trained, KEPT_ADAPTER if they are frozen below an adapter. These are DDP's first buckets, which DDP replaces by ones
in another order, weights before flattening or sharding, gathered and merged weights, and exchange buffers."""
BEFORE_MOMENTS = 0.5
"""Share of AdamW's moments that reuses freed blocks in the first step: the moments are allocated after its backward."""


def kept_bytes(job: Job) -> float:
    """Bytes of freed memory that a rank's heap keeps while training goes on."""
    table, stage = (KEPT_ADAPTER if job.is_frozen else KEPT_FULL), job.launch.stage
    key: str | int = "ddp" if job.launch.backend != "deepspeed" else stage
    if job.launch.offload("optimizer") != "none":
        key = "offload 3" if stage == 3 else "offload"
    constant_gib, each = table[key]
    return constant_gib * GIB + each * job.shape.parameters


def on_cpu(job: Job, at: Placed, forward: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Bytes by phase and component of a rank that trains on a CPU, without its copy of what checkpoints write.

    Args:
        at: model states, those of device and host added up, which are one memory here.
        forward: as in `closed_form.assemble`.
    """
    backend = "deepspeed" if job.launch.backend == "deepspeed" else "ddp"
    start = PROCESS_BYTES[backend] + (IMAGES_BYTES + 2 * PIXEL * job.pixels if job.pixels else 0)
    converts = job.loaded_bytes != job.stored_bytes
    loaded = (job.loaded_bytes + job.stored_bytes) * job.shape.parameters if converts else 0
    replaced = 0.0  # weights before they were flattened or sharded, and pages of files that are still mapped
    if job.launch.stage:
        replaced = job.loaded_bytes * (job.parameters if job.launch.stage == 3 or not job.is_frozen else 0)
    elif backend == "ddp" and converts:
        replaced = job.stored_bytes * job.shape.parameters
    later, kept = start + GROWTH_BYTES, kept_bytes(job)
    states = at.master + at.averages + at.moments
    resident = {"weights": at.weights, "gradients": at.held, "optimizer": states, "buffers": kept}
    after = _phase(later, resident, {name: HEAP * size for name, size in forward.items()})
    after["activations"] += passing_bytes(job)  # without HEAP: it has no backward, nor does what follows use it again
    gradients = at.gradients + at.in_flight
    step = _add(after, gradients=gradients, buffers=at.buffers + at.gathered)
    update = _add(after, gradients=gradients + at.update)
    most = max(step, update, key=lambda each: sum(each.values()))
    before = {**resident, "optimizer": at.master + at.averages + at.sharding, "buffers": replaced}
    phases = {
        "load": _phase(start, {"weights": loaded}),
        "shard": _phase(start, before),
        "first_step": _add(most, optimizer=-BEFORE_MOMENTS * at.moments),
        "step": most,
    }
    if job.eval_rows:
        phases["evaluate"] = _add(after, buffers=at.gathered + at.swapping)
    if job.saves:
        phases["save"] = after
    phases["export"] = _add(after, buffers=at.swapping)
    return phases


def _phase(process: float, *parts: dict[str, float]) -> dict[str, float]:
    names = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    found = {name: sum(part.get(name, 0.0) for part in parts) for name in names}
    return found | {"overhead": process}


def _add(to: dict[str, float], **more: float) -> dict[str, float]:
    return to | {name: to[name] + size for name, size in more.items()}
