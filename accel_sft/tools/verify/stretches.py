"""Which stretches of a run's steps can be run again, which of them are, and what that decides."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

from accel_sft.tools.verify.records import Recorded


@dataclasses.dataclass(frozen=True)
class Stretch:
    """The steps after `begin` up to `end`, both of which have a checkpoint, but for the run's start and its end."""

    begin: int
    end: int

    @property
    def steps(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"steps {self.begin + 1} to {self.end}" if self.steps else f"export after step {self.end}"


def candidates(run: Recorded, *, from_start: bool) -> list[Stretch]:
    """The stretches between the checkpoints that are whole, and to the end of a finished run; none of a run on several
    machines, which cannot be launched here.

    That before the first checkpoint is one of them if it is no longer than the longest other one, or with `from_start`.
    """
    if run.machines > 1:
        return []
    ends = [*run.saved]
    if run.complete and run.trained and (last := run.trained[-1]["step"]) > max(ends, default=0):
        ends.append(last)
    found = [Stretch(*pair) for pair in itertools.pairwise(ends)]
    if ends and (from_start or ends[0] <= max((stretch.steps for stretch in found), default=0)):
        found.insert(0, Stretch(0, ends[0]))
    return found


def chosen(possible: Sequence[Stretch], segments: int, seed: int) -> list[Stretch]:
    """Draw `segments` of the stretches, each with the same chance, so that every step has it too."""
    drawn = random.Random(seed).sample(possible, min(segments, len(possible)))
    return sorted(drawn, key=lambda stretch: stretch.begin)


def chance(possible: Sequence[Stretch], segments: int) -> float:
    """The chance that a stretch that was changed is one of those drawn."""
    return min(segments, len(possible)) / len(possible) if possible else 0.0


def in_words(run: Recorded, possible: Sequence[Stretch], again: Sequence[Stretch]) -> list[str]:
    """What the stretches that were run `again` decide, and what no checkpoint can."""
    total = run.trained[-1]["step"] if run.trained else 0
    covered = sum(stretch.steps for stretch in again)
    lines = []
    if again:
        lines.append(
            f"{len(again)} of {len(possible)} segments were run again, {covered:,} of {total:,} steps; a forged step, "
            f"with records that agree with it, is found with a probability of {chance(possible, len(again)):.0%}"
        )
    first = possible[0].begin if possible else total
    behind = total - (possible[-1].end if possible else first)
    if first:
        lines.append(
            f"steps 1 to {first} are before the first checkpoint that is kept: --from-start runs them again too; "
            "--keep-checkpoints every:N keeps more of them"
        )
    if behind and possible:
        lines.append(f"steps {total - behind + 1} to {total} are after the last checkpoint")
    if run.machines > 1:
        lines.append("no segment can be run again: the run was on several machines")
    elif not possible:
        lines.append("no segment can be run again: no two checkpoints are kept")
    return lines
