"""Warns once if a GPU idles or waits for other ranks in training, and names the likely cause, judged by measurements.

NVML counts the time in which any kernel ran. NCCL's kernels run, and spin, while a rank waits for another rank: a
waiting GPU reads 100%. So the processes measure waiting themselves. If a rank finishes its batches and forwards sooner
than another rank, it waits for that rank in its own backward, at least for the difference. Waiting is not measured
under ZeRO-3 and FSDP (ranks wait within a forward there), or if ranks share rows.
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from accel_sft.tracking.system import NewReading
from accel_sft.tracking.time_spent import BATCHES, TimeSpent

WARMUP_STEPS = 10
WINDOW_STEPS = 10
WINDOW_READINGS = 20
"""A window has at least WINDOW_STEPS steps, and WINDOW_READINGS readings of each GPU, which come once a second."""
LOW_PERCENT = 50.0
_MUCH = 0.2
"""If making batches takes at least this share of a window's time, it counts as the cause."""
_BEHIND = 0.1
"""The same share for waiting; it is smaller because only waiting caused by forwards is measured."""
_SMALL_TOKENS = 4096
"""A forward of fewer tokens may take longer to launch than to run."""


class IdleWatch:
    """Watches GPU use over windows of steps. Evaluations, checkpoints and a process's first steps do not count."""

    def __init__(self) -> None:
        self._steps, self._warned = 0, False
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
        """Count a step; returns a warning the first time that a GPU idles or waits for other ranks, else None.

        `record` is the step's line of metrics.jsonl; `seconds` is the time spent in each span since the step
        before, `times` how often the span was entered; `readings` are the new readings by rank.
        """
        self._steps += 1
        if self._warned or self._steps <= WARMUP_STEPS:
            return None
        for rank, (now, before) in readings.items():
            if before and not math.isnan(now.gpu_percent):
                self._percents[rank].append(now.gpu_percent)
                self._forward_seconds[rank] += now.forward_seconds - before.forward_seconds
        self._time.add(record["seconds"], seconds)
        self._forwards += times.get(BATCHES, 0) - 2  # a step's first two spans of this name read and divide the rows
        self._tokens += record["tokens"]
        fewest = min(map(len, self._percents.values()), default=0)
        if self._time.steps < WINDOW_STEPS or fewest < WINDOW_READINGS:
            return None
        warning = self._warning(f"in steps {record['step'] - self._time.steps + 1} to {record['step']}", ranks)
        self._warned = warning is not None
        self._begin_window()
        return warning

    def _warning(self, window: str, ranks: int) -> str | None:
        use = {rank: sum(percents) / len(percents) for rank, percents in self._percents.items()}
        slowest, quickest = (end(use, key=lambda rank: self._forward_seconds[rank]) for end in (max, min))
        behind = self._forward_seconds[slowest] - self._forward_seconds[quickest]
        if (share := behind / self._time.seconds) >= _BEHIND:  # false for NaN: not measured
            return (
                f"rank {quickest} waits for rank {slowest} for {share:.0%} of a step or longer, {window}: "
                "compare the clocks, heat and load of their GPUs"
            )
        idlest = min(use, key=lambda rank: use[rank])
        if use[idlest] >= LOW_PERCENT:
            return None
        gpu = f"the GPU of rank {idlest}" if ranks > 1 else "the GPU"
        return f"{gpu} idles: a kernel ran in {use[idlest]:.0f}% of the time {window}; {self._cause(ranks)}"

    def _cause(self, ranks: int) -> str:
        shares = {name: seconds / self._time.seconds for name, seconds in self._time.parts.items()}
        tokens, largest = self._tokens / max(self._forwards * ranks, 1), max(shares, key=shares.__getitem__)
        if shares.get(BATCHES, 0.0) >= _MUCH:
            return f"making batches takes {shares[BATCHES]:.0%} of a step: look at the host's load and disk"
        if tokens < _SMALL_TOKENS:
            return f"a forward has {tokens:,.0f} tokens: try a larger --micro-batch-size"
        return f"{shares[largest]:.0%} of a step is spent on: {largest}; see --profile"
