"""Runs accel_sft on a shape's rows, as one rank of a run whose memory benchmarks/plan_accuracy.py measures."""

from __future__ import annotations

import json
import sys

from accel_sft.launch.environment import prepare_environment

prepare_environment()  # as the command line does before torch is imported

import rows  # noqa: E402
from accel_sft.commands import train  # noqa: E402

settings = json.loads(sys.argv[1])
config = rows.settings(settings["model"], settings["batch"], **settings["options"])
train.run("rows", rows.Rows(path=settings["rows"]), config)
