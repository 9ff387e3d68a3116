"""Defines and runs a check, whose findings are `ok`, `warning` or `problem`, each with its remedy."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from accel_sft.api.errors import UserError
from accel_sft.launch.audit_findings import Finding, warning

if TYPE_CHECKING:
    from accel_sft.tools.doctor.machine import Machine

LEVELS = ("problem", "warning", "ok")
"""Levels of findings, the worst first. A problem means that training fails here, or that the check itself failed."""
__all__ = ["LEVELS", "Check", "Finding", "ok", "problem", "warning", "worst"]


def ok(what: str, fix: str = "") -> Finding:
    return Finding("ok", what, fix)


def problem(what: str, fix: str) -> Finding:
    return Finding("problem", what, fix)


def worst(findings: Iterable[Finding]) -> str:
    """The worst level among the findings; "ok" if there are none."""
    return min((finding.level for finding in findings), key=LEVELS.index, default="ok")


@dataclasses.dataclass(frozen=True)
class Check:
    """One check, which gives one or a few lines of the report.

    Attributes:
        subject: the heading under which its lines stand.
        name: what is checked, in a word or two.
        look: a function that makes the check and gives the findings.
        waiting_for: what the terminal shows while a check that takes seconds is running.
    """

    subject: str
    name: str
    look: Callable[[Machine], Iterable[Finding]]
    waiting_for: str = ""

    def run(self, machine: Machine) -> list[Finding]:
        """Make the check and return its findings; an exception becomes a finding, so that the report goes on."""
        try:
            with machine.progress(self.waiting_for):
                return list(self.look(machine))
        except UserError as error:
            return [problem(line, "") for line in error.problems]  # which names its fix
        except ImportError as error:
            what = f"not checked: {error.name or 'a library'} is missing ({error})"
            return [problem(what, "bash setup.sh in the checkout installs it with all others")]
        except Exception as error:  # noqa: BLE001 - whatever breaks one check, the others are still reported
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            what = f"the check failed: {type(error).__name__}: {error} ({where})"
            return [problem(what, "nothing is known of this; please report the line")]
