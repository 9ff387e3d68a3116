"""accel_sft: its own `train.run`, on a task that reads the rows; one process."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from accel_sft.environment import prepare_environment

prepare_environment()  # as the command line does before torch is imported

from accel_sft import Task, train  # noqa: E402
from accel_sft.config import TrainConfig  # noqa: E402
from accel_sft.fitting import Fitting  # noqa: E402
from gate import Gate  # noqa: E402

settings = json.loads(sys.argv[1])
gate = Gate(settings["warmup_steps"])


@dataclass(kw_only=True)
class Rows(Task):
    """Rows of a shape."""

    main_metric = "exact"

    def dataset(self, split):
        return json.loads(Path(settings["rows"]).read_text())

    def messages(self, example):
        roles = (("system", "instruction"), ("user", "question"))
        return [{"role": role, "content": example[key]} for role, key in roles if example[key]]

    def target(self, example):
        return example["answer"]

    def score(self, example, text):
        return {"exact": float(text == example["answer"])}


record = Fitting.record


def recorded(self, loss, *rest):
    record(self, loss, *rest)
    if self.progress.step == 1:
        gate.note(loss=loss, batching=f"{self.learner.batching.layout} {self.learner.batching.tokens}")
    gate.boundary()


Fitting.record = recorded
config = TrainConfig(
    model=settings["model"],
    max_steps=100_000,
    global_batch_size=settings["batch"],
    learning_rate=1e-4,
    warmup_ratio=0.0,
    lr_scheduler="constant",
    weight_decay=0.0,
    max_length=4096,
    eval_every="off",
    save_every="off",
    log_every=1_000_000,
    output_dir=tempfile.mkdtemp(),
    **settings.get("options", {}),
)
train.run("rows", Rows(), config)
