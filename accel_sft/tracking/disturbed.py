"""Finds steps in which a run was disturbed: other processes took cores, or a GPU was throttled. No torch.

Rank 0 marks readings in metrics.jsonl while a run lasts; reports and comparisons turn marks into segments of steps.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.launch.machine_state import slowed_by

KEY = "machine"
"""Key of the marks in a training line of metrics.jsonl; only lines with new readings have it."""
LOST = 0.1
"""Minimum share of the wanted cores (or of one core, if fewer are wanted) that is marked as lost. Daemons take less,
and counting in the kernel's ticks of 10 ms causes a smaller error per second."""
_FREE = 0.1
"""If at least this share of the cores is idle, other processes are not marked: the run could use the idle cores."""
OTHERS_GIB = 1.0
"""Minimum memory of other processes on a GPU that is marked: an idle CUDA context takes up to 0.6 GiB."""
_LEAST_READINGS = 3
"""Minimum number of marked readings (one per second) in a segment; clock dips and waking daemons are shorter."""
_LEAST_SHARE = 0.01
"""A segment has at least this share of the time of all steps; a shorter segment does not matter."""
MUCH = 0.1
"""If at least this share of the steps' time is disturbed, the run's speed is not used as this machine's. A smaller
share, even at half the speed, makes a run about 5% longer; repeated runs on a quiet machine differ by more."""
_SHOWN = 5


def marks(system: Sequence[Any]) -> dict[str, float]:
    """Find disturbances in all ranks' readings (`system`). Maps a sentence, with # for a number, to the number."""
    numbers = {}
    hosts = [rank for rank, read in enumerate(system) if not math.isnan(read.busy_cores)]
    for first, end in itertools.pairwise([*hosts, len(system)]):  # the first rank of each machine reads its cores
        read, where = system[first], f" of rank {first}'s machine" if first else ""
        busy, idle, stolen, held = read.busy_cores, read.idle_cores, read.stolen_cores, read.held_cores
        own, cores = sum(rank.cpu_percent for rank in system[first:end]) / 100, busy + idle + stolen
        for what, lost, wanted in (
            ("other processes took", busy - own if idle < _FREE * cores else 0.0, cores),
            ("a hypervisor took for other machines (steal)", stolen, busy + stolen),
            ("a container's CPU quota held back", held, own + held),
        ):
            if lost >= LOST * max(wanted, 1.0):
                numbers[f"{what} # of {cores:.0f} cores{where}"] = lost
    for rank, read in enumerate(system):
        if (why := slowed_by(read.gpu_slowed_by)) and read.gpu_clock_share > 0:
            highest = read.gpu_clock_mhz / read.gpu_clock_share
            numbers[f"rank {rank}'s GPU ran at # of {highest:,.0f} MHz ({why})"] = read.gpu_clock_mhz
        if read.gpu_others_gib >= OTHERS_GIB:
            numbers[f"other processes had # GiB of rank {rank}'s GPU"] = read.gpu_others_gib
    return numbers


def in_words(mark: str, number: float) -> str:
    """A mark's sentence with its number."""
    return mark.replace("#", f"{number:,.0f}" if number >= 10 else f"{number:.1f}")


@dataclasses.dataclass
class Segment:
    """Steps whose readings have the same mark: from `first` to `last`, with the `seconds` that they took."""

    mark: str
    first: int
    last: int = 0
    seconds: float = 0.0
    numbers: list[float] = dataclasses.field(default_factory=list)
    newest_reading: int = 0

    def __str__(self) -> str:
        return f"steps {self.first} to {self.last}: {in_words(self.mark, sum(self.numbers) / len(self.numbers))}"


def disturbed_segments(lines: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """The segments that matter in a run's training lines. A single reading without the mark does not end a segment."""
    begun: list[Segment] = []
    newest: dict[str, Segment] = {}  # by mark
    total, passed, before, readings = 0.0, 0.0, 0, 0  # passed: seconds since the reading at the step `before`
    for line in lines:
        seconds = line["seconds"] if is_number(line.get("seconds")) else 0.0
        total, passed = total + seconds, passed + seconds
        if not isinstance(read := line.get(KEY), dict):
            continue
        readings += 1
        for mark, number in ((mark, number) for mark, number in read.items() if is_number(number)):
            if mark not in newest or readings - newest[mark].newest_reading > 2:
                newest[mark] = Segment(mark, before + 1 if before else line["step"])
                begun.append(newest[mark])
            segment = newest[mark]
            segment.last, segment.seconds, segment.newest_reading = line["step"], segment.seconds + passed, readings
            segment.numbers.append(number)
        passed, before = 0.0, line["step"]
    least = _LEAST_SHARE * total
    return [one for one in begun if len(one.numbers) >= _LEAST_READINGS and one.seconds >= least]


def sentences(segments: Sequence[Segment]) -> list[str]:
    """The longest segments in words, in the order of their steps."""
    longest = sorted(segments, key=lambda segment: -segment.seconds)[:_SHOWN]
    return [str(segment) for segment in segments if segment in longest]


def share(lines: Sequence[Mapping[str, Any]], segments: Sequence[Segment]) -> float:
    """The share of these training lines' time that lies in the segments."""
    times = {line["step"]: line["seconds"] for line in lines if is_number(line.get("seconds"))}
    inside = [seconds for step, seconds in times.items() if any(one.first <= step <= one.last for one in segments)]
    return sum(inside) / sum(times.values()) if sum(times.values()) > 0 else 0.0
