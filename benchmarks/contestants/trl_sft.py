"""Runs TRL's SFTTrainer on prompt and completion: with its defaults, grouped by length, or packed."""

from __future__ import annotations

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

import peer

model, tokenizer = peer.read_model()
rows = [
    {"input_ids": prompt + answer, "completion_mask": [0] * len(prompt) + [1] * len(answer)}
    for prompt, answer in peer.read_rows(tokenizer)
]
options = {"max_length": 4096, "gradient_checkpointing": False, **peer.settings.get("options", {})}
adapter = None
if "lora" in peer.settings:
    from peft import LoraConfig

    adapter = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", **peer.settings["lora"])
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(completion_only_loss=True, **peer.arguments(), **options),
    peft_config=adapter,
    train_dataset=Dataset.from_list(rows),
    processing_class=tokenizer,
    callbacks=[peer.Gated()],
)
# packed data has fewer rows, so a step of it may hold more or less than the others' step
packed = sum(len(row["input_ids"]) for row in trainer.train_dataset)
peer.gate.note(tokens_per_step=packed * peer.settings["batch"] / len(trainer.train_dataset))
trainer.train()
