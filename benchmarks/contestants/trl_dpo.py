"""Runs TRL's DPOTrainer, from a saved `adapter` if given; `compact` computes the head on answers only, as on GPUs."""

from __future__ import annotations

import json
from pathlib import Path

import trl.trainer.utils
from datasets import Dataset
from peft import PeftModel
from trl import DPOConfig, DPOTrainer

import peer

steps: list[dict[str, float]] = []
names = {"loss": "loss", "grad_norm": "grad_norm", "pair_margin": "rewards/margins"}
names |= {"chosen_logprob": "logps/chosen", "rejected_logprob": "logps/rejected"}


class Recorded(peer.Gated):
    def on_log(self, args, state, control, logs=None, **_):
        if state.global_step <= peer.settings["warmup_steps"]:
            steps.append({ours: float(logs[name]) for ours, name in names.items()})
            peer.gate.note(steps=steps)


if peer.settings.get("compact"):
    trl.trainer.utils._use_triton = lambda _: True
model, tokenizer = peer.read_model()
if "adapter" in peer.settings:
    model = PeftModel.from_pretrained(model, peer.settings["adapter"], is_trainable=True)
pairs = [
    {"prompt": row["instruction"] + row["question"], "chosen": row["answer"], "rejected": row["rejected"]}
    for row in json.loads(Path(peer.settings["rows"]).read_text())
]
arguments = DPOConfig(**{**peer.arguments(), "max_length": 4096, **peer.settings.get("options", {})})
data = {"train_dataset": Dataset.from_list(pairs), "processing_class": tokenizer}
DPOTrainer(model, args=arguments, **data, callbacks=[Recorded()]).train()
