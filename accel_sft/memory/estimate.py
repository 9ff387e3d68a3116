"""`Estimate`: bytes of each component in each phase of a run, on one rank's device and in its host memory."""

import dataclasses
from collections.abc import Iterable, Mapping

PHASES = ("load", "shard", "first_step", "step", "evaluate", "save", "export")
"""Of a run, in their order. `first_step` is from the first forward to the first update; `step` any later one."""
COMPONENTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
"""`buffers`: what is exchanged, gathered, copied or staged, and pinned rounding; `overhead`: the process itself, its
libraries and contexts, and what the allocator wastes."""

Memory = Mapping[str, Mapping[str, float]]
"""phase -> component -> bytes. A phase or component that is not there was not estimated; one of no bytes is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a rank of a job takes at its most within each phase.

    Attributes:
        method: `closed form`, `simulation` or `probe`.
        device: memory of one rank's accelerator; {} where ranks train on the CPU.
        host: memory of one rank's process; for `method` closed form the private part of it (USS), since ranks share
            their libraries' code.
        local_ranks: on one machine, for `host_peak_bytes`.
        notes: on what the numbers rest, a sentence each.
        failure: why a probe measured nothing: then nothing is known to fit.
    """

    method: str
    device: Memory
    host: Memory
    local_ranks: int = 1
    notes: tuple[str, ...] = ()
    failure: str = ""

    @property
    def device_peak_bytes(self) -> float:
        """The most on one accelerator."""
        return max(totals(self.device).values(), default=0.0)

    @property
    def host_peak_bytes(self) -> float:
        """The most on one machine, over its ranks, which are taken to be in the same phase."""
        return self.local_ranks * max(totals(self.host).values(), default=0.0)

    @property
    def tightest(self) -> str | None:
        """The phase with the most memory where ranks train: on the accelerator, else on the host."""
        found = totals(self.device or self.host)
        return max(found, key=found.__getitem__) if found else None

    def fits(self, gpu_memory: float | None, host_memory: float | None) -> bool:
        """Whether a machine with these bytes of an accelerator and of host memory is enough; None: not known."""
        return not self.failure and not self.over(gpu_memory, host_memory)

    def over(self, gpu_memory: float | None, host_memory: float | None) -> tuple[str, ...]:
        """Which of `device` and `host` are not enough."""
        pairs = ("device", self.device_peak_bytes, gpu_memory), ("host", self.host_peak_bytes, host_memory)
        return tuple(name for name, needed, there in pairs if there is not None and needed > there)


def totals(memory: Memory) -> dict[str, float]:
    """Bytes of each phase, in the order of PHASES."""
    return {phase: sum(memory[phase].values()) for phase in PHASES if phase in memory}


def largest(memories: Iterable[Memory]) -> dict[str, dict[str, float]]:
    """Of several ranks' memory the phases in which a rank has most."""
    found: dict[str, dict[str, float]] = {}
    for memory in memories:
        for phase, components in memory.items():
            if phase not in found or sum(components.values()) > sum(found[phase].values()):
                found[phase] = dict(components)
    return found
