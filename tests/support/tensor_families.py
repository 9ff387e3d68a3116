"""Two ranks cut small models of several families, and write into FOLDER what of each differs from the whole model.

accelerate launch --config_file accelerate_configs/tp.yaml --mixed_precision no -m tensor_families FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from checkpoints import write
from transformers import AutoModelForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import shards
from accel_sft.io import manifest
from accel_sft.launch import groups
from accel_sft.models.pretrained import pretrained
from accel_sft.resilience.exit import leave_together
from accel_sft.training.optimizer import Stepper, new_optimizer

IDS = torch.arange(51).view(3, 17) * 37 % 90


def forwards(model, backward):
    """Two forwards of a step, whose gradients add up; returns the loss."""
    total = 0.0
    for ids in (IDS[:1], IDS[1:]):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
        backward(loss)
        total += loss.item()
    return total


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def apart(found, expected):
    return ((found - expected).norm() / expected.norm().clamp(min=1e-9)).item()


def of(folder):
    config = TrainConfig(max_grad_norm=0.1).resolved({})
    model = pretrained(
        str(folder), config, torch.float32, largest_id=90, train=True, log=lambda line: None, tensor_ranks=2
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = new_optimizer(model, config)
    model, optimizer = groups.prepare(accelerator, model, optimizer)
    stepper = Stepper(accelerator, model, optimizer, config.max_grad_norm)
    losses = forwards(model, stepper.backward), forwards(reference, torch.Tensor.backward)
    theirs = dict(reference.named_parameters())
    gradients = {name: apart(whole(p.grad), theirs[name].grad) for name, p in model.named_parameters()}
    norm = torch.nn.utils.get_total_norm([p.grad for p in theirs.values()]).item()
    found = {"loss": abs(losses[0] / losses[1] - 1), "gradient": max(gradients.values())}
    found["norm"] = abs(stepper.update(0) / norm - 1)
    saved = {name: whole(p).clone() for name, p in model.named_parameters()}
    moments = [whole(state["exp_avg"]).clone() for state in optimizer.state.values()]
    target = folder / "checkpoint"
    if accelerator.is_main_process:
        target.mkdir()
    accelerator.wait_for_everyone()
    write(accelerator, model, optimizer, target)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        manifest.write(target, {})
    accelerator.wait_for_everyone()
    with torch.no_grad():
        for tensor in (*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())):
            tensor.zero_()
    shards.read(accelerator, model, optimizer, target)
    same = [torch.equal(whole(p), saved[name]) for name, p in model.named_parameters()]
    same += [torch.equal(whole(s["exp_avg"]), m) for s, m in zip(optimizer.state.values(), moments, strict=True)]
    return {**found, "restored": all(same), "parts": sum(hasattr(p, "placements") for p in model.parameters())}


PartialState(cpu=True)
accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=1))
accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
root = Path(sys.argv[1])
result = {folder.name: of(folder) for folder in sorted(root.iterdir()) if folder.is_dir()}
if accelerator.is_main_process:
    (root / "found.json").write_text(json.dumps(result))
leave_together()
