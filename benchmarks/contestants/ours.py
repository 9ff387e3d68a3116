"""accel_sft: its own `train.run`, on a task that reads the rows; one process."""

from __future__ import annotations

import json
import sys

from accel_sft.environment import prepare_environment

prepare_environment()  # as the command line does before torch is imported

import rows  # noqa: E402
from accel_sft import train  # noqa: E402
from accel_sft.fitting import Fitting  # noqa: E402
from gate import Gate  # noqa: E402

settings = json.loads(sys.argv[1])
gate = Gate(settings)
record = Fitting.record


def recorded(self, loss, *rest):
    record(self, loss, *rest)
    if self.progress.step == 1:
        gate.note(loss=loss, batching=f"{self.learner.batching.layout} {self.learner.batching.tokens}")
    gate.boundary()


Fitting.record = recorded
config = rows.settings(settings["model"], settings["batch"], **settings.get("options", {}))
train.run("rows", rows.Rows(path=settings["rows"]), config)
