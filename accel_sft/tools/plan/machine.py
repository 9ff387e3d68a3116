"""Describes the machine that a plan is for, this one or one that the user describes, without torch."""

import dataclasses

from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.this_machine import nvidia_gpus, this_machine_computes_bf16

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PlannedMachine:
    """One of the machines of a launch.

    Attributes:
        gpus: number of GPUs; with 0, ranks train on the CPU.
        gpu_bytes: memory of one GPU; None without one.
        host_bytes: host memory that training may take.
        is_free: whether `host_bytes` is what is free on this machine now, not what the user gave.
        bf16: whether its ranks compute in bf16 natively; assumed of GPUs that the user describes.
        gpu: the name of its GPUs; "" if they are another machine's, or not all alike.
    """

    gpus: int
    gpu_bytes: float | None
    host_bytes: float
    is_free: bool = False
    bf16: bool = True
    gpu: str = ""

    def describe(self) -> str:
        """The machine in words, for the head of the table."""
        host = f"{self.host_bytes / GIB:.0f} GiB of host memory{' free' * self.is_free}"
        if not self.gpus:
            return f"no GPU, {host}"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} of {(self.gpu_bytes or 0) / GIB:.0f} GiB, {host}"


def machine(gpus: int | None, gpu_gib: float | None, host_gib: float | None) -> PlannedMachine:
    """Return the machine that the user describes; what the user leaves out is taken from this machine.

    GPUs come from NVIDIA's driver, and host memory is what is free within the container's limit.

    Raises:
        UserError: the memory of the GPUs is not known.
    """
    own = nvidia_gpus()[1] if gpus is None or (gpus and gpu_gib is None) else []
    sizes, names = [gpu["memory_gib"] for gpu in own], {gpu["name"] for gpu in own}
    count = len(sizes) if gpus is None else gpus
    if gpus is None and gpu_gib is not None and not sizes:
        count = 1
    if count and gpu_gib is None and (not sizes or None in sizes):
        why = f"the driver does not tell that of {', '.join(names)}" if sizes else "this machine has none to ask"
        raise UserError(f"--gpu-memory: give the GiB of one GPU, as {why}")
    return PlannedMachine(
        gpus=count,
        gpu_bytes=(min(sizes) * GIB if count else None) if gpu_gib is None else gpu_gib * GIB,
        host_bytes=host_memory.free_bytes() if host_gib is None else host_gib * GIB,
        is_free=host_gib is None,
        bf16=bool(gpus or (count and not sizes)) or this_machine_computes_bf16(with_gpus=count > 0),
        gpu=names.pop() if len(names) == 1 and gpu_gib is None else "",
    )
