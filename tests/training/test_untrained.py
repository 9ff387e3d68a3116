"""Weights that no gradient reaches are named once, under any layout; experts that no token chose are not among them."""

from __future__ import annotations

import types

import pytest
import torch
from conftest import accel_sft, finished
from rehearsal_faults import MATH, side

from accel_sft.training.checks import rounds_updates, without_experts

QUICK = ("--max-steps", "4", "--eval-every", "off", "--save-every", "off", "--dtype", "float32")
STAGES = ("plain", 0), ("ddp", 0), ("deepspeed", 0), ("deepspeed", 2)


LAUNCHES = {None: 0, "z0": 0, "z2": 0, "z3": 0, "ddp": 1}
"""Launch files, and the exit status of the run: data parallel training waits for every gradient."""


@pytest.mark.parametrize("yaml", [pytest.param(yaml, marks=[pytest.mark.long] if yaml else []) for yaml in LAUNCHES])
def test_a_layer_that_nothing_calls_is_named(yaml, tmp_path):
    (tmp_path / "own").mkdir()
    run = accel_sft(*side(tmp_path / "own"), *QUICK, yaml=yaml, run_dir=tmp_path / "run")
    assert run.status == LAUNCHES[yaml], run.output[-3000:]
    if run.status:
        assert "a trained weight gets no gradient" in " ".join(run.output.split())
        return
    assert run.result()["without_gradient"] == ["side.weight", "side.bias"]
    assert "weights without a gradient: 2 of" in " ".join(run.output.split())


def test_an_adapter_begins_at_zero_and_learns_all_the_same(tmp_path):
    run = finished(*MATH, *QUICK, "--adapter", "lora", "--max-steps", "2", run_dir=tmp_path / "run")
    assert run.result()["without_gradient"] == []


def test_unchosen_experts_are_distinguished_from_unreachable_ones():
    layer = "model.layers.{}.mlp.experts.{}.up_proj.weight"
    unreachable = [layer.format(1, 0), layer.format(1, 1)]
    assert without_experts([layer.format(0, 1), *unreachable], [layer.format(0, 0)]) == unreachable


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_updates_of_16_bit_weights_without_copies_are_rounded(precision):
    model, accelerator = torch.nn.Linear(2, 2), types.SimpleNamespace(mixed_precision=precision)
    launches = [types.SimpleNamespace(backend=name, stage=stage) for name, stage in STAGES]
    assert not any(rounds_updates(accelerator, launch, model) for launch in launches)
    rounded = [rounds_updates(accelerator, launch, model.bfloat16()) for launch in launches]
    assert rounded == [True, True, precision == "no", False]
    model.requires_grad_(False)
    assert not any(rounds_updates(accelerator, launch, model) for launch in launches)
