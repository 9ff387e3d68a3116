"""The small job that many tests launch, its layouts, and what laws 1 and 3 hold of two runs."""

from __future__ import annotations

import textwrap

import pytest
import torch
from conftest import accel_sft, stopped
from packaging.version import Version
from places import SUPPORT
from safetensors.torch import load_file

from accel_sft.models.pretrained import LOWEST_TORCH

STEPS = 6
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--validation-examples", "7")
JOB += ("--train-examples", "500", "--max-new-tokens", "6", "--seed", "7")
FP32 = ("--mixed_precision", "no")
SHARDED = {"yaml": "fsdp2", "module": "fsdp2_on_cpu", "environment": {"PYTHONPATH": str(SUPPORT)}, "launcher": FP32}
ONCE = ("--eval-every", "off", "--save-every", "off")
CUTS_WEIGHTS = pytest.mark.skipif(
    Version(torch.__version__) < Version(LOWEST_TORCH), reason="this torch cuts no weights over ranks"
)


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


def own_task(folder, methods):
    """Write the task math with these methods as a file, and return the word that names it."""
    head = (
        "import atexit, os, pathlib, sys, torch\nfrom dataclasses import dataclass\nfrom accel_sft_math import Math\n\n"
    )
    own = f"@dataclass(kw_only=True)\nclass Own(Math):\n{textwrap.indent(methods, '    ')}"
    (folder / "own.py").write_text(head + own)
    return f"{folder}/own.py:Own"


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


def same_weights(expected, got, folder="final"):
    """Two runs have exported the same tensors, bit by bit."""
    files = sorted((expected / folder).glob("*.safetensors"))
    assert [file.name for file in files] == sorted(file.name for file in (got / folder).glob("*.safetensors"))
    for file in files:
        ours, theirs = load_file(got / folder / file.name), load_file(file)
        assert ours.keys() == theirs.keys()
        assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


def weights(folder):
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def resumed(whole, run_dir, *arguments, **options):
    """Resume a run that ended before its end; its losses and weights are those of the run that did not stop."""
    run = accel_sft(*arguments, "--resume", "auto", run_dir=run_dir, **{**whole.options, **options})
    assert run.status == 0, run.output
    assert [line["loss"] for line in run.lines()] == [line["loss"] for line in whole.lines()]
    same_weights(whole.run_dir, run_dir)
    return run


def goes_on_to_the_same_bits(whole, run_dir, step, **options):
    """Resume a copy of a run as it was at this step, and compare it with the run that did not stop."""
    return resumed(whole, stopped(whole, run_dir, step), *whole.arguments, **options)
