"""`Estimate`: bytes of each component in each phase of a run, on one rank's device and in its host memory."""

import dataclasses
from collections.abc import Mapping

PHASES = ("load", "shard", "first_step", "step", "evaluate", "save", "export")
"""Phases of a run, in order. `first_step` is from the first forward to the first update; `step` is any later step."""
WITH_COPY = ("step", "evaluate", "save", "export")
"""Phases in which host memory has copies of the state and of the best weights, for what is written behind them."""
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""Parts of a rank's memory. `buffers`: communication buckets, gathered weights, copies for a disk or another device,
freed memory that the heap keeps; `overhead`: the process, its libraries, the CUDA context, a GPU allocator's gaps."""

Memory = Mapping[str, Mapping[str, float]]
"""phase -> component -> bytes. A missing phase or component was not estimated; one that takes no memory is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """The most memory that a rank of a job takes within each phase.

    Attributes:
        method: `closed form` (computed from the model's shape) or `probe` (measured in two steps of the run).
        device: memory of one rank's accelerator; {} where ranks train on the CPU.
        host: resident memory of one rank's process, the pages that it shares with other ranks included.
        spare_bytes: what a rank does without in the phases WITH_COPY where host memory is short: training then waits
            while checkpoints are written file by file.
        local_ranks: ranks on one machine, for `host_peak_bytes`.
        notes: what the numbers rest on, one sentence each.
        failure: why a probe measured nothing. The job then counts as one that does not fit.
    """

    method: str
    device: Memory
    host: Memory
    spare_bytes: float = 0.0
    local_ranks: int = 1
    notes: tuple[str, ...] = ()
    failure: str = ""

    @property
    def device_peak_bytes(self) -> float:
        """Bytes of the largest phase on one accelerator."""
        return max(totals(self.device).values(), default=0.0)

    @property
    def host_peak_bytes(self) -> float:
        """Bytes of the largest phase on one machine, summed over its ranks, which are taken to be in the same phase."""
        return self.local_ranks * max(totals(self.host).values(), default=0.0)

    @property
    def host_needed(self) -> dict[str, float]:
        """Bytes of each phase in one rank's host memory, without the copies of `spare_bytes`."""
        return {phase: size - self.spare_bytes * (phase in WITH_COPY) for phase, size in totals(self.host).items()}

    @property
    def host_needed_bytes(self) -> float:
        """`host_peak_bytes` without these copies: host memory of less does not fit."""
        return self.local_ranks * max(self.host_needed.values(), default=0.0)

    @property
    def tightest(self) -> str | None:
        """The phase that takes the most memory of the accelerator, or of the host where ranks train on the CPU."""
        found = totals(self.device or self.host)
        return max(found, key=found.__getitem__) if found else None

    def fits(self, gpu_memory: float | None, host_memory: float | None) -> bool:
        """Whether the job fits into `gpu_memory` bytes of each accelerator and `host_memory` bytes of each machine. A
        memory of None is not compared."""
        return not self.failure and not self.over(gpu_memory, host_memory)

    def over(self, gpu_memory: float | None, host_memory: float | None) -> tuple[str, ...]:
        """Which of `device` and `host` has too little memory; a memory of None is not compared."""
        pairs = ("device", self.device_peak_bytes, gpu_memory), ("host", self.host_needed_bytes, host_memory)
        return tuple(name for name, needed, there in pairs if there is not None and needed > there)


def totals(memory: Memory) -> dict[str, float]:
    """Bytes of each phase, in the order of PHASES."""
    return {phase: sum(memory[phase].values()) for phase in PHASES if phase in memory}
