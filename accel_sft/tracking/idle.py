"""Warns once if a GPU idles or waits for others during training, and names the likely cause by measurements.

NVML counts the time in which any kernel ran. NCCL's run, and spin, while their rank waits for another: a waiting GPU
reads 100%. So waiting is measured in the processes: a rank whose batches and forwards take less time than another's
waits for that one in its backward, at least for the difference. Under ZeRO-3 and FSDP, whose ranks wait within a
forward, and where ranks share rows, it is not measured.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accel_sft.tracking.system import Reading
from accel_sft.tracking.time_spent import BATCHES, COMMUNICATION, OPTIMIZER, PAUSE

WARMUP_STEPS = 10
WINDOW_STEPS = 10
WINDOW_READINGS = 20
"""A window has at least WINDOW_STEPS steps, and WINDOW_READINGS readings of each GPU, which come once a second."""
LOW_PERCENT = 50.0
_MUCH = 0.2
"""Share of a window's time from which on an activity counts as a cause."""
_BEHIND = 0.1
"""The same for waiting, of which only the part is measured that comes from forwards: backwards take longer."""
_SMALL_TOKENS = 4096
"""A forward of fewer tokens may take longer to launch than to run."""
PAUSE_SECONDS = 0.05


class IdleWatch:
    """Looks at GPU use over windows of steps. Evaluations, checkpoints and a start's first steps do not count.

    Args:
        offloaded: what the launch keeps on the host: `optimizer`, `param`.
        images: whether rows have images, which this process resizes.
    """

    def __init__(self, offloaded: Collection[str] = (), images: bool = False) -> None:
        self._offloaded, self._images = offloaded, images
        self._steps, self._told = 0, False
        self._latest: dict[int, Reading] = {}  # by rank
        self._stale: set[int] = set()  # ranks whose next reading covers a pause
        self._begin_window()

    def _begin_window(self) -> None:
        self._readings: dict[int, list[float]] = defaultdict(list)
        self._forward_seconds: defaultdict[int, float] = defaultdict(float)  # by rank
        self._spent: Counter[str] = Counter()
        self._forwards, self._tokens, self._seconds = 0, 0, 0.0
        self._window: list[int] = []

    def step(
        self,
        record: Mapping[str, Any],
        seconds: Mapping[str, float],
        times: Mapping[str, int],
        system: Sequence[Reading],
    ) -> str | None:
        """Count a step; returns a warning the first time that a GPU idles or waits for others, else None.

        Args:
            record: the step's line of metrics.jsonl: `step`, `tokens` of all ranks, `seconds`.
            seconds: seconds that this rank spent in each span since the step before.
            times: how often this rank was in each span since then.
            system: each rank's reading.
        """
        if self._told or all(math.isnan(reading.gpu_percent) for reading in system):
            return None
        self._steps += 1
        ranks = range(len(system))
        if seconds.get(PAUSE, 0.0) > PAUSE_SECONDS or self._steps <= WARMUP_STEPS:
            self._stale.update(ranks)
        for rank in ranks:
            new, before = system[rank], self._latest.get(rank)
            if (before is None or before.sample != new.sample) and not math.isnan(new.gpu_percent):
                self._latest[rank] = new
                if rank in self._stale or before is None:
                    self._stale.discard(rank)
                    continue
                self._readings[rank].append(new.gpu_percent)
                self._forward_seconds[rank] += new.forward_seconds - before.forward_seconds
        if self._steps <= WARMUP_STEPS:
            return None
        self._spent.update(seconds)
        self._forwards += times.get(BATCHES, 0) - 2  # a step's first two spans read and divide its rows
        self._tokens += record["tokens"]
        self._seconds += record["seconds"]
        self._window.append(record["step"])
        fewest = min((len(found) for found in self._readings.values()), default=0)
        if len(self._window) < WINDOW_STEPS or fewest < WINDOW_READINGS:
            return None
        use = {rank: sum(found) / len(found) for rank, found in self._readings.items()}
        least = min(use, key=lambda rank: use[rank])
        last = max(use, key=lambda rank: self._forward_seconds[rank])
        behind = self._forward_seconds[last]
        waits = {rank: (behind - self._forward_seconds[rank]) / self._seconds for rank in use}  # NaN: not measured
        longest = max(waits, key=lambda rank: waits[rank])
        warning = None
        if use[least] < LOW_PERCENT:
            warning = self._idling(least, use, len(ranks), waits[least], last)
        elif waits[longest] >= _BEHIND:
            warning = self._waiting(longest, use[longest], waits[longest], last)
        self._told = warning is not None
        self._begin_window()
        return warning

    def _waiting(self, rank: int, use: float, share: float, last: int) -> str:
        return (
            f"rank {rank} waits for rank {last} for {share:.0%} of a step or longer, in steps {self._window[0]} to "
            f"{self._window[-1]} (its GPU reads {use:.0f}% busy, as kernels that wait count). Look at rank {last}'s "
            "clocks, temperature, other processes, or --profile"
        )

    def _idling(self, least: int, use: Mapping[int, float], ranks: int, waits: float, last: int) -> str:
        whose = f"the GPU of rank {least}" if ranks > 1 else "the GPU"
        most = f" (of the rank with most: {max(use.values()):.0f}%, waiting included)" if ranks > 1 else ""
        return (
            f"{whose} idles: a kernel ran in {use[least]:.0f}% of the time of steps {self._window[0]} to "
            f"{self._window[-1]}{most}. {self._cause(ranks, least, waits, last)}; --profile traces where the time goes"
        )

    def _cause(self, ranks: int, least: int, waits: float, last: int) -> str:
        where = " on rank 0" if ranks > 1 else ""
        measured = not math.isnan(waits)
        share = {name: spent / self._seconds for name, spent in self._spent.items()}
        share[COMMUNICATION] = waits if waits >= _BEHIND else 0.0
        what, look = "reading rows and making batches", "the disk with the token cache"
        if self._images:
            what, look = "reading rows, resizing images and making batches", "the images' size"
        causes = {
            BATCHES: f"{what} takes {{}} of a step{where}, on the host; look at {look}, and at what else keeps the "
            "host's cores busy"
        }
        if "optimizer" in self._offloaded:
            causes[OPTIMIZER] = (
                f"the optimizer runs on the host, which takes {{}} of a step{where}; a launch file without offload is "
                "faster where memory suffices (`accel-sft plan`)"
            )
        if ranks > 1:
            causes[COMMUNICATION] = (
                f"rank {least} waits for rank {last} for {{}} of a step or longer; look for a slower GPU there"
            )
        likely = max(causes, key=lambda name: share.get(name, 0.0))
        if share.get(likely, 0.0) >= (_BEHIND if likely == COMMUNICATION else _MUCH):
            return "Likely cause: " + causes[likely].format(f"{100 * share[likely]:.0f}%")
        if "param" in self._offloaded:
            return (
                "Likely cause: weights are kept on the host and copied for every layer; `accel-sft plan` names others"
            )
        tokens = self._tokens / max(self._forwards * ranks, 1)
        if tokens < _SMALL_TOKENS:
            return (
                f"Likely cause: a forward has {tokens:,.0f} tokens, {self._forwards / len(self._window):.0f} of them a "
                f"step{where}: launching so small kernels takes longer than they run; try a larger --micro-batch-size, "
                "a larger --global-batch-size, or --compile"
            )
        waiting = "" if measured else "; how long ranks wait for each other is not measured under this launch"
        return f"No cause was measured: batches and optimizer each take less than a fifth of a step{waiting}"
