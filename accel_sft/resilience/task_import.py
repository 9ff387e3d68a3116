"""Imports a task under the hang watch, because its module may hang or the launcher be killed. No torch."""

import contextlib
import sys

from accel_sft.api import registry
from accel_sft.api.task import Task
from accel_sft.launch.launcher import under_launcher
from accel_sft.launch.rank_environment import launcher_flags


def load_task(name: str, hang_timeout: int) -> type[Task]:
    """Return the task's class. No option is read yet: `--hang-timeout` counts on the command line, not in a file.

    Raises:
        UserError: what `registry.load` raises.
    """
    from accel_sft.resilience.signals import StopSignals
    from accel_sft.resilience.watchdog import Watchdog

    asked = launcher_flags(sys.argv).get("hang_timeout", "")
    signals = StopSignals() if under_launcher() else contextlib.nullcontext()
    with signals, Watchdog(int(asked) if asked.isdecimal() else hang_timeout, alone=True):
        return registry.load(name)
