"""The machine that a plan is for: this one, or one that the user describes. No torch."""

import dataclasses

from accel_sft.launch import host_memory

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Machine:
    """One of the machines of a launch.

    Attributes:
        gpus: 0: ranks train on the CPU.
        gpu_bytes: of one GPU; None: not known.
        host_bytes: of memory that training may take.
    """

    gpus: int
    gpu_bytes: float | None
    host_bytes: float

    def describe(self) -> str:
        """In words, for the head of a table."""
        host = f"{self.host_bytes / GIB:.0f} GiB of host memory"
        if not self.gpus:
            return f"no GPU, {host}"
        size = "of unknown memory" if self.gpu_bytes is None else f"of {self.gpu_bytes / GIB:.0f} GiB"
        return f"{self.gpus} GPU{'s' * (self.gpus > 1)} {size}, {host}"


def machine(gpus: int | None, gpu_gib: float | None, host_gib: float | None) -> Machine:
    """What the user gave, and of this machine what they did not: its GPUs as NVIDIA's driver names them, its free host
    memory within the limits of containers."""
    sizes = _gpus() if gpus is None or (gpus and gpu_gib is None) else []
    count = len(sizes) if gpus is None else gpus
    if gpus is None and gpu_gib is not None and not sizes:
        count = 1
    smallest = min(sizes, default=None)
    return Machine(
        gpus=count,
        gpu_bytes=smallest if gpu_gib is None else gpu_gib * GIB,
        host_bytes=host_memory.free_bytes() if host_gib is None else host_gib * GIB,
    )


def _gpus() -> list[float]:
    """Memory of each GPU of this machine, in bytes; none without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
        return [float(pynvml.nvmlDeviceGetMemoryInfo(handle).total) for handle in handles]
    finally:
        pynvml.nvmlShutdown()
