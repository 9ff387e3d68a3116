"""The small job that many tests launch, its layouts, and the comparison of two of its loss curves."""

from __future__ import annotations

import pytest
import torch
from conftest import accel_sft
from safetensors.torch import load_file

STEPS = 6
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7")
JOB += ("--train-examples", "500", "--max-new-tokens", "6", "--seed", "7")
FP32 = ("--mixed_precision", "no")
ONCE = ("--eval-every", "off", "--save-every", "off")


LAYOUTS = {
    "plain": {},
    "plain with recomputed activations": {},
    "ddp": {"yaml": "ddp", "launcher": FP32},
    "ddp on three ranks": {"yaml": "ddp", "launcher": (*FP32, "--num_processes", "3")},
    "z2": {"yaml": "z2", "launcher": FP32},
    "z3": {"yaml": "z3", "launcher": FP32, "real": True},
    "z2_offload": {"yaml": "z2_offload", "launcher": FP32},
    "z3_sp": {"yaml": "z3_sp", "launcher": FP32},
    "tp": {"yaml": "tp", "launcher": FP32},
    "torchrun": {"torchrun": ("--standalone", "--nproc_per_node", "2")},
    "z2 alone": {"yaml": "z2", "launcher": (*FP32, "--num_processes", "1")},
}
MICRO = {"plain": "3", "ddp": "2", "z2": "2", "z3": "1"}
FLAGS = {"plain with recomputed activations": ("--gradient-checkpointing",)}


def layout(launched, name):
    """Launch the reference job under a layout, with the layout's micro-batch size in MICRO or the automatic one."""
    arguments = (*JOB, "--save-every", "3") if name in ("plain", "z2", "z3", "tp") else (*JOB, *ONCE)
    arguments += ("--micro-batch-size", MICRO.get(name, "auto"), *FLAGS.get(name, ()))
    return launched(name, *arguments, **LAYOUTS[name])


def same_curve(reference, other):
    assert [line["step"] for line in other] == list(range(1, STEPS + 1))
    for expected, line in zip(reference, other, strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=2e-5)
        assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=2e-4)
        assert line["supervised_tokens"] == expected["supervised_tokens"]
        assert line["learning_rate"] == expected["learning_rate"]


def resumed(whole, run_dir, *arguments):
    """Resume a run of the job that ended before its end, and compare its weights and losses with the whole run's, bit
    for bit."""
    run = accel_sft(*arguments, "--resume", "auto", run_dir=run_dir, **whole.options)
    assert run.status == 0, run.output
    (path,) = (whole.run_dir / "final").glob("*model.safetensors")
    expected, got = load_file(path), load_file(run_dir / "final" / path.name)
    assert all(torch.equal(expected[key], got[key]) for key in expected)
    assert [line["loss"] for line in run.lines()] == [line["loss"] for line in whole.lines()]
    return run
