"""transformers' Trainer as scripts use it: every row padded to the longest in the data, answers labelled."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback, TrainingArguments

from gate import Gate

settings = json.loads(sys.argv[1])
gate = Gate(settings["warmup_steps"])
tokenizer = AutoTokenizer.from_pretrained(settings["model"])
model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32)
rows = []
for row in json.loads(Path(settings["rows"]).read_text()):
    prompt = tokenizer(row["instruction"] + row["question"])["input_ids"]
    answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
    rows.append((prompt, answer))
longest = max(len(prompt) + len(answer) for prompt, answer in rows)


def collate(rows):
    """Fixed padding: that of the published scripts."""
    ids, mask, labels = [], [], []
    for prompt, answer in rows:
        padding = longest - len(prompt) - len(answer)
        ids.append(prompt + answer + [tokenizer.pad_token_id] * padding)
        mask.append([1] * (longest - padding) + [0] * padding)
        labels.append([-100] * len(prompt) + answer + [-100] * padding)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


class Gated(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **_):
        if state.global_step == 1 and "loss" in (logs or {}):
            gate.note(loss=logs["loss"])

    def on_step_begin(self, args, state, control, **_):
        if state.global_step:
            gate.boundary()


arguments = TrainingArguments(
    output_dir=tempfile.mkdtemp(),
    per_device_train_batch_size=settings["rows_per_forward"],
    gradient_accumulation_steps=settings["batch"] // settings["rows_per_forward"],
    max_steps=100_000,
    learning_rate=1e-4,
    lr_scheduler_type="constant",
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    remove_unused_columns=False,
    use_cpu=True,
    disable_tqdm=True,
    bf16=settings.get("precision") == "bf16",
)
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[Gated()]).train()
