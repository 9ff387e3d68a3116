"""A task of accel_sft that reads a shape's rows, and the settings with which it is measured."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accel_sft import Task, option
from accel_sft.api.config import TrainConfig


@dataclass(kw_only=True)
class Rows(Task):
    """Rows of a shape."""

    main_metric = "exact"
    path: str = option(help="The JSON file that shapes.write made.")

    def dataset(self, split):
        return json.loads(Path(self.path).read_text())

    def messages(self, example):
        roles = (("system", "instruction"), ("user", "question"))
        return [{"role": role, "content": example[key]} for role, key in roles if example[key]]

    def target(self, example):
        return example["answer"]

    def rejected(self, example):
        return example.get("rejected")

    def score(self, example, text):
        return {"exact": float(text == example["answer"])}


def settings(model: str, global_batch_size: int, **options: Any) -> TrainConfig:
    """Plain AdamW at a constant rate, without evaluations, checkpoints or console lines; `options` override these."""
    usual = {
        "max_steps": 100_000,
        "learning_rate": 1e-4,
        "warmup_ratio": 0.0,
        "lr_scheduler": "constant",
        "weight_decay": 0.0,
        "max_length": 4096,
        "eval_every": "off",
        "save_every": "off",
        "log_every": 1_000_000,
        "output_dir": tempfile.mkdtemp(),
    }
    return TrainConfig(model=model, global_batch_size=global_batch_size, **{**usual, **options})
