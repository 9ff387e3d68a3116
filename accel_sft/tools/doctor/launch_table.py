"""Decides which launch files work here, and why the others do not."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch.audit import audit
from accel_sft.launch.deepspeed_ops import operators
from accel_sft.launch.info import Launch
from accel_sft.tools.doctor.machine import Machine
from accel_sft.tools.doctor.operators import lacking
from accel_sft.tools.doctor.torch_facts import LIBRARIES


@dataclass(frozen=True)
class LaunchRow:
    """One launch file in the table of launch files that `doctor` prints.

    Attributes:
        file: the launch file's name without suffix.
        flags: the launcher's flags that it needs here.
        why: why it does not work; if it works, what the user should know before a launch.
        fix: the remedy, if it does not work and one is known.
    """

    file: str
    works: bool
    flags: str = ""
    why: str = ""
    fix: str = ""


def row(machine: Machine, file: Path) -> LaunchRow:
    """Find out whether a launch with this file would work here."""
    try:
        # the last library is DeepSpeed, which only some launch files need
        if reason := next(filter(None, map(machine.torch.failure, LIBRARIES[:-1])), ""):
            return LaunchRow(file.stem, False, why=reason)
        if machine.devices and (reason := machine.unusable.get("devices", "")):
            return LaunchRow(file.stem, False, why=reason)
        launch = machine.launch(file)
        for finding in audit(TrainConfig(), launch, machine.devices):
            if finding.level == "error":
                what = re.sub(rf"^{re.escape(str(file))}:? ", "", lacking(finding))
                return LaunchRow(file.stem, False, why=what, fix=finding.fix)
        if reason := _unusable(machine, launch):
            return LaunchRow(file.stem, False, why=reason)
        return LaunchRow(file.stem, True, " ".join(machine.flags(file)), _to_know(machine, launch))
    except UserError as error:
        return LaunchRow(file.stem, False, why=str(error))
    except Exception as error:  # noqa: BLE001 - a fault with one file must not hide the other files
        return LaunchRow(file.stem, False, why=f"it could not be checked: {type(error).__name__}: {error}")


def _unusable(machine: Machine, launch: Launch) -> str:
    """Return why DeepSpeed, its operators or a group of ranks, which this launch needs, fail here; "" if none does."""
    if launch.backend == "deepspeed" and (reason := machine.torch.failure("deepspeed")):
        return reason
    compiled = operators(launch)
    if unknown := [name for name in compiled if name not in machine.torch.operators]:
        return f"it is not known whether DeepSpeed's operator {unknown[0]} works here"
    needed = [*compiled, *(["ranks"] if launch.world_size > 1 else [])]
    return next((machine.unusable[what] for what in needed if what in machine.unusable), "")


def _to_know(machine: Machine, launch: Launch) -> str:
    words = []
    if launch.machines > 1:
        words.append(f"needs {launch.machines} machines like this one")
    state = machine.torch.operators
    if missing := [name for name in operators(launch) if not state[name]["compiled"]]:
        words.append(f"the first launch compiles {' and '.join(missing)}")
    return "; ".join(words)
