"""Imports a task under the hang watch, as its module may hang or the launcher be killed meanwhile. No torch."""

import contextlib
import sys

from accel_sft.api import registry
from accel_sft.api.task import Task
from accel_sft.launch.launcher import under_launcher
from accel_sft.launch.rank_environment import launcher_flags


def load_task(name: str, hang_timeout: int) -> type[Task]:
    """The task's class. `--hang-timeout` counts from the command line only, not from a file: no option is read yet.

    Raises:
        UserError: what `registry.load` raises.
    """
    from accel_sft.resilience.signals import StopSignals
    from accel_sft.resilience.watchdog import Watchdog

    asked = launcher_flags(sys.argv).get("hang_timeout", "")
    signals = StopSignals() if under_launcher() else contextlib.nullcontext()
    with signals, Watchdog(int(asked) if asked.isdecimal() else hang_timeout, alone=True):
        return registry.load(name)
