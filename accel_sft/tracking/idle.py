"""Warns once if a GPU idles or waits for others during training, and names the likely cause by measurements.

NVML counts the time in which any kernel ran. NCCL's run, and spin, while their rank waits for another: a waiting GPU
reads 100%. So waiting is measured in the processes: a rank whose batches and forwards take less time than another's
waits for that one in its backward, at least for the difference. Under ZeRO-3 and FSDP, whose ranks wait within a
forward, and where ranks share rows, it is not measured.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from accel_sft.tracking.system import NewReading
from accel_sft.tracking.time_spent import BATCHES, OPTIMIZER, TimeSpent

WARMUP_STEPS = 10
WINDOW_STEPS = 10
WINDOW_READINGS = 20
"""A window has at least WINDOW_STEPS steps, and WINDOW_READINGS readings of each GPU, which come once a second."""
LOW_PERCENT = 50.0
_MUCH = 0.2
"""Share of a window's time from which on an activity counts as a cause."""
_BEHIND = 0.1
"""The same for waiting. Only the part that comes from forwards is measured: backwards take longer."""
_SMALL_TOKENS = 4096
"""A forward of fewer tokens may take longer to launch than to run."""


class IdleWatch:
    """Looks at GPU use over windows of steps. Evaluations, checkpoints and a start's first steps do not count.

    Args:
        offloaded: what the launch keeps on the host: `optimizer`, `param`.
        images: whether rows have images, which this process resizes.
    """

    def __init__(self, offloaded: Collection[str] = (), images: bool = False) -> None:
        self._offloaded, self._images = offloaded, images
        self._steps, self._warned = 0, False
        self._warm: set[int] = set()  # ranks whose next reading covers no step of the warm-up
        self._begin_window()

    def _begin_window(self) -> None:
        self._percents: dict[int, list[float]] = defaultdict(list)  # GPU use, by rank
        self._forward_seconds: defaultdict[int, float] = defaultdict(float)  # by rank
        self._time = TimeSpent()
        self._forwards, self._tokens = 0, 0

    def step(
        self,
        record: Mapping[str, Any],
        seconds: Mapping[str, float],
        times: Mapping[str, int],
        readings: Mapping[int, NewReading],
        ranks: int,
    ) -> str | None:
        """Count a step; returns a warning the first time that a GPU idles or waits for others, else None.

        Args:
            record: the step's line of metrics.jsonl: `step`, `tokens` of all ranks, `seconds`.
            seconds: seconds that this rank spent in each span since the step before.
            times: how often this rank was in each span since then.
            readings: the new ones, by rank.
            ranks: their number.
        """
        self._steps += 1
        if self._warned or self._steps < WARMUP_STEPS:
            return None
        for rank, (now, before) in readings.items():
            if before and rank in self._warm and not math.isnan(now.gpu_percent):
                self._percents[rank].append(now.gpu_percent)
                self._forward_seconds[rank] += now.forward_seconds - before.forward_seconds
            self._warm.add(rank)
        if self._steps == WARMUP_STEPS:
            return None
        self._time.add(record["seconds"], seconds)
        self._forwards += times.get(BATCHES, 0) - 2  # a step's first two spans read and divide its rows
        self._tokens += record["tokens"]
        fewest = min(map(len, self._percents.values()), default=0)
        if self._time.steps < WINDOW_STEPS or fewest < WINDOW_READINGS:
            return None
        warning = self._warning(record["step"], ranks)
        self._warned = warning is not None
        self._begin_window()
        return warning

    def _warning(self, step: int, ranks: int) -> str | None:
        """What is to be said of the window that ends with this step."""
        window = f"in steps {step - self._time.steps + 1} to {step}"
        use = {rank: sum(percents) / len(percents) for rank, percents in self._percents.items()}
        slowest = max(use, key=lambda rank: self._forward_seconds[rank])
        behind = {rank: self._forward_seconds[slowest] - self._forward_seconds[rank] for rank in use}
        waits = {rank: seconds / self._time.seconds for rank, seconds in behind.items()}  # NaN: not measured
        idlest, longest = (min(use, key=lambda rank: use[rank]), max(waits, key=lambda rank: waits[rank]))
        if use[idlest] < LOW_PERCENT:
            whose = f"the GPU of rank {idlest}" if ranks > 1 else "the GPU"
            waiting = f"it waits for rank {slowest} for {waits[idlest]:.0%} of a step or longer"
            cause = self._cause(ranks, waits[idlest], f"{waiting}: look for a slower GPU there")
            return f"{whose} idles: a kernel ran in {use[idlest]:.0f}% of the time {window}; {cause}"
        if waits[longest] >= _BEHIND:
            return (
                f"rank {longest} waits for rank {slowest} for {waits[longest]:.0%} of a step or longer, {window}, "
                f"though its GPU reads {use[longest]:.0f}% busy: compare their clocks, heat and load"
            )
        return None

    def _cause(self, ranks: int, waits: float, waiting: str) -> str:
        batches, optimizer = (self._time.parts[name] / self._time.seconds for name in (BATCHES, OPTIMIZER))
        tokens = self._tokens / max(self._forwards * ranks, 1)
        look = "the images' size" if self._images else "the disk with the token cache"
        causes = {f"making batches takes {batches:.0%} of a step: look at {look} and the host's load": batches}
        if "optimizer" in self._offloaded:
            causes[f"the optimizer on the host takes {optimizer:.0%} of a step: is there room without offload?"] = (
                optimizer
            )
        if waits >= _BEHIND:
            causes[waiting] = max(waits, _MUCH)
        likely = max(causes, key=lambda cause: causes[cause])
        if causes[likely] >= _MUCH:
            return likely
        if "param" in self._offloaded:
            return "weights are copied from the host for every layer: `accel-sft plan` names other launches"
        if tokens < _SMALL_TOKENS:
            return f"a forward has {tokens:,.0f} tokens: try a larger --micro-batch-size, or --compile"
        return "neither batches nor the optimizer take a fifth of a step; see a --profile"
