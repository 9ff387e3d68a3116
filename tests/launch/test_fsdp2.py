"""FSDP2 through the command line, on two CPU ranks; tests/laws/test_layouts.py has its arithmetic."""

from __future__ import annotations

import json

import fsdp2_on_cpu
import pytest
import torch
from conftest import accel_sft
from fsdp2_job import FP32, SHARDED, weights
from reference_job import goes_on_to_the_same_bits

pytestmark = pytest.mark.skipif(not fsdp2_on_cpu.RUNS_HERE, reason="this torch's FSDP2 does not run on CPUs")
JOB = ("math", "--max-steps", "4", "--save-every", "2", "--global-batch-size", "10", "--validation-examples", "7")
JOB += ("--train-examples", "200", "--max-new-tokens", "6", "--seed", "7", "--micro-batch-size", "2")
JOB += ("--keep-checkpoints", "3")
LORA = ("--adapter", "lora", "--lora-dropout", "0", "--eval-every", "2")


def test_fsdp2_adapter_has_the_ddp_curve_and_exports_whole(launched):
    sharded = launched("fsdp2 lora", *JOB, *LORA, **SHARDED)
    plain = launched("fsdp2's ddp lora", *JOB, *LORA, yaml="ddp", **FP32)
    for ours, theirs in zip(sharded.lines(), plain.lines(), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=2e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=2e-4)
    for ours, theirs in zip(sharded.lines("eval_loss"), plain.lines("eval_loss"), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=2e-5)
    exported, expected = weights(sharded.run_dir / "final"), weights(plain.run_dir / "final")
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5)


def test_evaluate_gives_the_runs_own_numbers(launched, tmp_path):
    whole = launched("fsdp2 lora", *JOB, *LORA, **SHARDED)
    done = accel_sft("evaluate", "math", "--model", str(whole.run_dir), run_dir=tmp_path / "evaluation", **SHARDED)
    assert done.status == 0, done.output
    alone, own = json.loads((tmp_path / "evaluation" / "result.json").read_text())["after"], whole.result()["after"]
    assert alone["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-5)
    for name in ("accuracy", "format_rate"):
        assert alone[name] == own[name]


# HSDP: two copies of a model that two ranks each share; test_layouts.py resumes one copy
@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 2])
def test_tied_model_resumes_bit_for_bit_and_writes_one_head(launched, tmp_path, copies):
    arguments = (*JOB, "--eval-every", "off", "--gradient-checkpointing")
    ranks = {"launcher": ("--num_processes", str(2 * copies), *FP32["launcher"])}
    sharing = SHARDED | ranks | {"yaml": "hsdp" if copies > 1 else "fsdp2"}
    whole = launched(f"fsdp2 full {copies}", *arguments, **sharing)
    goes_on_to_the_same_bits(whole, tmp_path / "run", 2, **sharing)
    theirs = weights(whole.run_dir / "final")
    assert "lm_head.weight" not in theirs
    if copies > 1:
        newest = max((whole.run_dir / "checkpoints").iterdir())
        assert len([*newest.glob("rank-*.safetensors")]) == 2  # of the first copy's ranks: others hold the same
        plain = launched("fsdp2's ddp of four", *arguments, yaml="ddp", **ranks)
        for one, other in zip(whole.lines(), plain.lines(), strict=True):
            assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
        expected = weights(plain.run_dir / "final")
        for name in expected:
            torch.testing.assert_close(theirs[name], expected[name], rtol=1e-3, atol=1e-5)
