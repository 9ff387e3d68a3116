"""Runs transformers' Trainer as scripts use it: every row padded to the longest in the data, answers labelled."""

from __future__ import annotations

import torch
from transformers import Trainer, TrainingArguments

import peer

model, tokenizer = peer.read_model()
rows = peer.read_rows(tokenizer)
longest = max(len(prompt) + len(answer) for prompt, answer in rows)


def collate(rows):
    """Pad all rows to one fixed length, as published scripts do."""
    ids, mask, labels = [], [], []
    for prompt, answer in rows:
        padding = longest - len(prompt) - len(answer)
        ids.append(prompt + answer + [tokenizer.pad_token_id] * padding)
        mask.append([1] * (longest - padding) + [0] * padding)
        labels.append([-100] * len(prompt) + answer + [-100] * padding)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(labels)}


arguments = TrainingArguments(remove_unused_columns=False, **peer.arguments())
Trainer(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=[peer.Gated()]).train()
