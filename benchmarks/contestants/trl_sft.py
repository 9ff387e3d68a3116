"""TRL's SFTTrainer on prompt and completion: its defaults, grouped by length, or packed."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

from gate import Gate

settings = json.loads(sys.argv[1])
gate = Gate(settings["warmup_steps"])
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
rows = []
for row in json.loads(Path(settings["rows"]).read_text()):
    prompt = tokenizer(row["instruction"] + row["question"])["input_ids"]
    answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
    rows.append({"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)})
tokens = sum(len(row["input_ids"]) for row in rows)


class Gated(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.global_step == 1 and "loss" in (logs or {}):
            gate.note(loss=logs["loss"])

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:
            gate.boundary()


options = dict(settings.get("options", {}))
rows_per_forward = settings["rows_per_forward"]
accumulate = settings["batch"] // rows_per_forward
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=rows_per_forward,
        gradient_accumulation_steps=accumulate,
        max_steps=100_000,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        bf16=settings.get("precision") == "bf16",
        completion_only_loss=True,
        gradient_checkpointing=False,
        **{"max_length": 4096, **options},
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[Gated()],
)
# packed data has fewer rows, so a step of it may hold more or less than the others' step
packed = sum(len(row["input_ids"]) for row in trainer.train_dataset)
gate.note(tokens_per_step=packed * settings["batch"] / len(trainer.train_dataset))
trainer.train()
