"""Faults of a run for `accel-sft rehearse` to find: what the user has, and which stage must say what."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import architectures
import torch
from models import make_tiny
from places import CONFIGS
from safetensors.torch import load_file, save_file

MATH = ("math", "--train-examples", "200", "--validation-examples", "8", "--global-batch-size", "32")
TASK = '''
import random
from dataclasses import dataclass
from accel_sft import option
from accel_sft_math import Math

@dataclass(kw_only=True)
class Faulty(Math):
    """Sums, with a fault."""
    fault: str = option("", help="Which.")

    def dataset(self, split):
        rows = [*super().dataset(split)]
        return random.sample(rows, len(rows)) if self.fault == "drawn" else rows

    def score(self, example, text):
        scores = super().score(example, text)
        assert self.fault != "score" or scores["format_rate"], "no answer"
        return {**scores, "accuracy": 0.0} if self.fault == "strict" else scores
'''
UNUSED = """
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

class SideConfig(Qwen2Config):
    model_type = "side"

class SideModel(Qwen2ForCausalLM):
    config_class = SideConfig

    def __init__(self, config):
        super().__init__(config)
        self.side = torch.nn.Linear(config.hidden_size, config.hidden_size)
        self.post_init()
"""


class Fault(NamedTuple):
    """A fault, and which stage says what."""

    stage: str
    words: str
    plant: Callable[[Path], tuple[str, ...]]  # makes it in a folder, and returns the words of the command line


def misspelt(folder):
    text = (CONFIGS / "z2.yaml").read_text()
    (folder / "launch.yaml").write_text(text.replace("zero_stage: 2", "zero_sage: 3"))
    return (*MATH, "--launch", str(folder / "launch.yaml"))


def options(*words):
    return lambda folder: (*MATH, *(word.format(folder=folder) for word in words))


def model(*words, **generation):
    """With a pretrained model, with these settings of generation in place of its own."""

    def plant(folder):
        made = make_tiny(folder / "model")
        if generation:
            (made / "generation_config.json").write_text(json.dumps(generation))
        return (*MATH, "--model", str(made), *words)

    return plant


def task(fault, *words):
    def plant(folder):
        (folder / "sums.py").write_text(TASK)
        return (str(folder / "sums.py"), "--fault", fault, *MATH[1:], *words)

    return plant


def family(name, *words):
    return lambda folder: (*MATH, "--model", str(architectures.make(folder / "model", name)), *words)


def side(folder):
    made = make_tiny(folder / "model")
    (made / "side.py").write_text(UNUSED)
    weights = load_file(made / "model.safetensors")
    wide = weights["model.norm.weight"].numel()
    weights |= {"side.weight": torch.eye(wide), "side.bias": torch.zeros(wide)}
    save_file(weights, made / "model.safetensors", {"format": "pt"})
    config = json.loads((made / "config.json").read_text())
    own = {"AutoConfig": "side.SideConfig", "AutoModelForCausalLM": "side.SideModel"}
    (made / "config.json").write_text(json.dumps({**config, "model_type": "side", "auto_map": own}))
    return (*MATH, "--model", str(made), "--trust-remote-code")


LORA = "--adapter", "lora", "--lora-target-modules"
FAULTS = {
    "a misspelt key": Fault("launch", "zero_sage is unknown", misspelt),
    "answers that the score calls wrong": Fault("data", "D501", task("strict")),
    "a checkpoint that never comes": Fault("data", "--save-every 5000 is never due", options("--save-every", "5000")),
    "an adapter on a layer that is not there": Fault("load", "no such module", model(*LORA, "q_prj")),
    # reported: peft #2545, unsloth #11014
    "an adapter that does not reach the experts": Fault(
        "model", "--lora-target-parameters", family("deepseek_v3", *LORA, "down_proj")
    ),
    "a NaN loss": Fault("steps", "the loss is nan", options("--learning-rate", "1e30", "--on-nonfinite", "skip")),
    "a score that fails on what a model writes": Fault("evaluation", "no answer", task("score")),
    "data that are drawn anew": Fault("resume", "the data is not what the run was started with", task("drawn")),
    "a learning rate of zero": Fault("reload", "nothing was learnt", options("--learning-rate", "0")),
    "weights that nothing uses": Fault("trained", "side.weight, side.bias", side),
    # reported: peft #2018
    "an adapter on a tied head": Fault("merge", "one of two tied layers", model(*LORA, "lm_head,q_proj")),
    # reported: unsloth #416, trl #1623
    "an end that a server does not stop at": Fault(
        "generate", "a server of the base does not stop there", model("--adapter", "lora", eos_token_id=[0])
    ),
}
