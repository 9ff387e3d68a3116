"""A script for the ranks of a launch: prints the memory that forward and backward of one row take on rank 0.

accelerate launch --config_file accelerate_configs/z3_sp.yaml tests/support/activations.py TOKENS
"""

# ruff: noqa: E402, the environment comes before torch

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from accel_sft.launch.environment import prepare_environment

prepare_environment()

import torch
from fake_memory import Device
from transformers import Qwen2Config, Qwen2ForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.sequence import SequenceGroup
from accel_sft.chat.encoded import Encoded
from accel_sft.launch import accelerator
from accel_sft.launch.groups import shared_rows
from accel_sft.launch.info import launch_of_this_process
from accel_sft.training.optimizer import Stepper, new_optimizer

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def main(tokens: int) -> None:
    """Print the MiB that the forward keeps for its backward, and the MiB at the peak, beyond what was there before."""
    config = TrainConfig().resolved({})
    launched, launch = accelerator.create_accelerator(config, launch_of_this_process())
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, **HEADS, max_position_embeddings=tokens)).train()
    optimizer = new_optimizer(model, config)
    model, optimizer = accelerator.prepare_model(launched, launch, model, optimizer, config.max_grad_norm)
    stepper = Stepper(launched, model, optimizer, config.max_grad_norm)
    row = Encoded(0, [5 + at % 300 for at in range(tokens)], tokens // 2)
    whole = Batching("padded", 2**31, rows=1, head="pieces").batch([row], 0, launched.device)
    batch = SequenceGroup.of(launched).part(whole, 0)
    with Device() as device:
        before = device.live
        with shared_rows(), stepper.boundary(last=True):
            nll = nll_sum(model, batch)
            kept = device.live - before
            stepper.backward(nll / tokens)
    if launched.is_main_process:
        print(f"a row of {tokens} tokens: kept {kept / 2**20:.0f} MiB, peak {(device.peak - before) / 2**20:.0f} MiB")
    launched.wait_for_everyone()


if __name__ == "__main__":
    main(int(sys.argv[1]))
