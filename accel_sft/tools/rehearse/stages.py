"""The stages of a rehearsal: whether each holds, or what would fail in the real run, when, and how to fix it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.io.findings import Finding, lines, worst
from accel_sft.io.terminal import wrapped

FAILS, WARNS, HOLDS, NOT_REACHED = "fails", "warns", "holds", "not reached"
"""States of a stage. The first two are levels of findings: the real run would fail, or go on and disappoint."""
fails, warns = (functools.partial(Finding, level) for level in (FAILS, WARNS))
STAGES = (
    *("launch", "data", "model", "load", "steps", "trained", "evaluation", "checkpoint", "resume", "export"),
    *("reload", "merge", "generate"),
)
_COLORS = {FAILS: "red", WARNS: "yellow"}
_WIDTH = 12
"""Width of the columns of a stage's name and state."""


@dataclasses.dataclass
class Stage:
    """A stage of a run: when the real run comes to it, what was seen in the rehearsal, and what is wrong."""

    name: str
    when: str = ""
    seen: str = ""
    findings: list[Finding] = dataclasses.field(default_factory=list)
    reached: bool = False

    @property
    def state(self) -> str:
        return worst(self.findings, (FAILS, WARNS, HOLDS)) if self.reached else NOT_REACHED

    def as_dict(self) -> dict[str, Any]:
        """The stage as an object of the JSON report."""
        findings = [finding.as_dict() for finding in self.findings]
        return {"stage": self.name, "state": self.state, "when": self.when, "seen": self.seen, "findings": findings}


class Stages:
    """All stages of a rehearsal, each shown once its state is known.

    Args:
        show: prints a line.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self.all = {name: Stage(name) for name in STAGES}

    def ended(self, name: str, *findings: Finding, seen: str = "", when: str = "") -> None:
        """Say what a stage came to."""
        stage = self.all[name]
        stage.reached, stage.seen = True, seen
        stage.findings += [dataclasses.replace(finding, subject=name) for finding in findings]
        stage.when = when or stage.when
        self._show(wrapped(f"{name:<{_WIDTH}}{stage.state:<{_WIDTH}}{seen}".rstrip(), 2 * _WIDTH))
        for finding in findings:
            where = stage.when if finding.level == FAILS else ""
            for line in lines(dataclasses.replace(finding, subject=where), _COLORS, indent=4):
                self._show(line)

    @contextlib.contextmanager
    def reported(self, name: str) -> Iterator[None]:
        """Inside, what fails is said of the stage: libraries may raise anything here."""
        try:
            yield
        except UserError as error:
            self.ended(name, *map(fails, error.problems))  # each as it is: a "; " need not stand before its fix
        except Exception as error:  # noqa: BLE001
            self.ended(name, fails(f"unexpected: {what_and_where(error)}"))

    @property
    def failed(self) -> bool:
        """Whether a stage fails."""
        return any(stage.state == FAILS for stage in self.all.values())

    def count(self, level: str) -> int:
        return sum(finding.level == level for stage in self.all.values() for finding in stage.findings)
