"""Adapters as runs export them, and answerers of saved weights."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from peft import get_peft_model
from report_card import card
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.evaluation.answerer import Answerer
from accel_sft.models.source import find_source


def save_adapter(base, folder, config):
    """An adapter far from its start."""
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.05)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    (folder / "README.md").write_text(card(adapter="lora", base_model="org/model"))
    return folder


def answerer(folder, *sampling, offload=None, log=print, **options):
    config = EvaluateConfig(model=str(folder), **options).resolved({})
    return Answerer(Accelerator(cpu=True), config, find_source(str(folder)), *sampling, offload=offload, log=log)
