"""Holds the result of an audit: findings, figures and examples, which are printed, put on a page, or given as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from accel_sft.tools.check.examples import Shown
from accel_sft.tools.check.figures import SplitFigures, StepFigures
from accel_sft.tools.check.findings import DataFinding


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of auditing a task's data for a model.

    Attributes:
        findings: the gravest first.
        steps: the figures of the training steps; None if the training split cannot be used.
        notes: lines on how the data was read, such as what the chat template did.
    """

    task: str
    model: str
    findings: list[DataFinding]
    splits: list[SplitFigures]
    steps: StepFigures | None
    notes: list[str]
    examples: list[Shown]

    def count(self, grade: str) -> int:
        return sum(finding.grade == grade for finding in self.findings)

    def failed(self, strict: bool) -> bool:
        """Whether there are errors or, with `strict`, warnings."""
        return bool(self.count("error") or (strict and self.count("warning")))

    @property
    def verdict(self) -> str:
        """How many errors, warnings and notes there are, in words."""
        if not self.findings:
            return "nothing was found that needs fixing"
        counts = [(grade, self.count(grade)) for grade in ("error", "warning", "note")]
        return ", ".join(f"{count} {grade}{'s' * (count != 1)}" for grade, count in counts if count)

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "task": self.task,
            "model": self.model,
            **{f"{grade}s": self.count(grade) for grade in ("error", "warning", "note")},
            "findings": [finding.as_dict() for finding in self.findings],
            "splits": [dataclasses.asdict(split) for split in self.splits],
            "steps": self.steps and dataclasses.asdict(self.steps),
            "notes": self.notes,
            "examples": [
                {**dataclasses.asdict(shown), "pieces": [piece._asdict() for piece in shown.pieces]}
                for shown in self.examples
            ],
        }
