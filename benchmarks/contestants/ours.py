"""Runs accel_sft's own `train.run` on a task that reads the rows, in one process or as a rank under a launcher.

Rows in a `.jsonl` file have CLUENER's form, and the `ner` task reads them.
"""

from __future__ import annotations

import json
import sys

from accel_sft.launch.environment import prepare_environment

prepare_environment()  # as the command line does before torch is imported

import rows  # noqa: E402
from accel_sft.batching.layouts import Batching  # noqa: E402
from accel_sft.commands import train  # noqa: E402
from accel_sft.models import prefix_attention  # noqa: E402
from accel_sft.results.run_report import PAIR_METRICS  # noqa: E402
from accel_sft_ner import Ner  # noqa: E402
from gate import Gate  # noqa: E402

settings = json.loads(sys.argv[1])
if settings.get("copied"):  # rows attend to copies of their prefix, as if torch had no kernels
    prefix_attention.usable = lambda *_: False
gate = Gate(settings)
steps: list[dict[str, float | None]] = []


def stepped(record: dict[str, float], batching: Batching) -> None:
    if record["step"] == 1:
        gate.note(loss=record["loss"], batching=f"{batching.layout} {batching.rows or batching.tokens}")
    if record["step"] <= settings["warmup_steps"]:
        steps.append({name: record.get(name) for name in ("loss", "grad_norm", *PAIR_METRICS)})
        gate.note(steps=steps)
    gate.boundary()


config = rows.settings(settings["model"], settings["batch"], **settings.get("options", {}))
file = settings["rows"]
if file.endswith(".jsonl"):
    train.run("ner", Ner(train_file=file, validation_file=file, allow_overlap=True), config, on_step=stepped)
else:
    train.run("rows", rows.Rows(path=file), config, on_step=stepped)
