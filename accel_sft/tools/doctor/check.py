"""What a check finds (`ok`, `warning` or `problem`, each with its remedy), and how one check is run."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from accel_sft.api.errors import UserError
from accel_sft.launch.info import Finding, warning

if TYPE_CHECKING:
    from accel_sft.tools.doctor.machine import Machine

LEVELS = ("problem", "warning", "ok")
"""The worst first. With a problem, training fails here, or what was asked of the report could not be found out."""
__all__ = ["LEVELS", "Check", "Finding", "ok", "problem", "warning", "worst"]


def ok(what: str, mend: str = "") -> Finding:
    return Finding("ok", what, mend)


def problem(what: str, mend: str) -> Finding:
    return Finding("problem", what, mend)


def worst(findings: Iterable[Finding]) -> str:
    """The worst level among the findings; "ok" if there are none."""
    return min((finding.level for finding in findings), key=LEVELS.index, default="ok")


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the report, or a few.

    Attributes:
        subject: the heading under which it stands.
        name: what is checked, in a word or two.
        look: gives the findings.
        waiting_for: what the terminal says meanwhile, for a check that takes seconds.
    """

    subject: str
    name: str
    look: Callable[[Machine], Iterable[Finding]]
    waiting_for: str = ""

    def run(self, machine: Machine) -> list[Finding]:
        """The findings; a check that raises is one itself, and the report goes on."""
        try:
            with machine.progress(self.waiting_for):
                return list(self.look(machine))
        except UserError as error:
            return [problem(*line.rsplit("; ", 1)) if "; " in line else problem(line, "") for line in error.problems]
        except ImportError as error:
            what = f"not checked: {error.name or 'a library'} is missing ({error})"
            return [problem(what, "bash setup.sh in the checkout installs it with all others")]
        except Exception as error:  # noqa: BLE001 - whatever a machine does to a check, the others are still told
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(frame.filename).name}:{frame.lineno}"
            what = f"the check failed: {type(error).__name__}: {error} ({where})"
            return [problem(what, "nothing is known of this; please report the line")]
