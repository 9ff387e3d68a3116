"""What a rehearsal says: for each stage of a run whether it holds or what would fail, when, and how to fix it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from accel_sft.io.terminal import wrapped
from accel_sft.io.text import one_line

FAILS, WARNS, HOLDS, NOT_REACHED = "fails", "warns", "holds", "not reached"
"""What is said of a stage, the gravest first."""
STAGES = (
    *("launch", "data", "model", "load", "steps", "trained", "evaluation", "checkpoint", "resume", "export"),
    *("reload", "merge", "generate"),
)
_LONGEST = 600


@dataclasses.dataclass(frozen=True)
class Flaw:
    """What is wrong: the real run would fail (`FAILS`), or go on and disappoint (`WARNS`)."""

    state: str
    what: str
    fix: str = ""


@dataclasses.dataclass
class Stage:
    """A stage of a run: when the real run comes to it, what was seen in the rehearsal, and what is wrong."""

    name: str
    when: str = ""
    seen: str = ""
    flaws: list[Flaw] = dataclasses.field(default_factory=list)
    reached: bool = False

    @property
    def state(self) -> str:
        if not self.reached:
            return NOT_REACHED
        return min((flaw.state for flaw in self.flaws), key=(FAILS, WARNS).index, default=HOLDS)

    def as_dict(self) -> dict[str, Any]:
        """The stage as an object of the JSON report."""
        flaws = [dataclasses.asdict(flaw) for flaw in self.flaws]
        return {"stage": self.name, "state": self.state, "when": self.when, "seen": self.seen, "flaws": flaws}


class Stages:
    """All stages of a rehearsal, each printed once it is known.

    Args:
        show: prints a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.all = {name: Stage(name) for name in STAGES}

    def ended(self, name: str, *flaws: Flaw, seen: str = "", when: str = "") -> None:
        """Say what a stage came to."""
        stage = self.all[name]
        stage.reached, stage.seen = True, seen
        stage.flaws += flaws
        stage.when = when or stage.when
        margin = 24
        text = f"{name:<{margin // 2}}{stage.state:<{margin // 2}}{seen}"
        self._show(wrapped(text.rstrip(), margin))
        for flaw in flaws:
            where = f"{stage.when}: " if stage.when and flaw.state == FAILS else ""
            self._show(wrapped(f"{'':<4}{flaw.state}: {where}{one_line(flaw.what, _LONGEST)}", 8))
            if flaw.fix:
                self._show(wrapped(f"{'':<6}-> {one_line(flaw.fix, _LONGEST)}", 9))

    @property
    def failed(self) -> bool:
        """Whether a stage fails."""
        return any(stage.state == FAILS for stage in self.all.values())

    def count(self, state: str) -> int:
        return sum(flaw.state == state for stage in self.all.values() for flaw in stage.flaws)


def flaws_of(*lines: str) -> list[Flaw]:
    """The problems that the trainer tells, each as it is: a "; " may stand before its fix or elsewhere."""
    return [Flaw(FAILS, line) for line in lines]
