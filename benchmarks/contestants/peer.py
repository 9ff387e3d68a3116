"""Shared by the contestants on transformers' Trainer: rows, model, tokenizer, settings and the gate."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from gate import Gate

settings: dict[str, Any] = json.loads(sys.argv[1])
gate = Gate(settings)


def read_model() -> tuple[Any, Any]:
    """The model and its tokenizer; the weights are float32, or bfloat16 if they are frozen and the run is in bf16."""
    frozen = "lora" in settings and settings.get("precision") == "bf16"
    dtype = torch.bfloat16 if frozen else torch.float32
    return (
        AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype),
        AutoTokenizer.from_pretrained(settings["model"]),
    )


def read_rows(tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    """The token ids of each row: (prompt, answer with its end-of-turn token)."""
    rows = []
    for row in json.loads(Path(settings["rows"]).read_text()):
        prompt = tokenizer(row["instruction"] + row["question"])["input_ids"]
        rows.append((prompt, [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]))
    return rows


def arguments() -> dict[str, Any]:
    """TrainingArguments for the same optimizer step as all contestants, with this trainer's rows per forward."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "per_device_train_batch_size": settings["rows_per_forward"],
        "gradient_accumulation_steps": settings["batch"] // settings["rows_per_forward"],
        "max_steps": 100_000,
        "learning_rate": 1e-4,
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": not torch.cuda.is_available(),
        "disable_tqdm": True,
        "bf16": settings.get("precision") == "bf16",
    }


class Gated(TrainerCallback):
    """Waits at the gate between two optimizer steps, and notes the loss of the first step."""

    def on_log(self, args, state, control, logs=None, **_):
        if state.global_step == 1 and "loss" in (logs or {}):
            gate.note(loss=float(logs["loss"]))

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:
            gate.boundary()
