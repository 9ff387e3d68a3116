"""FSDP2 through the command line, on two CPU ranks; tests/laws/test_layouts.py has its arithmetic."""

from __future__ import annotations

import json

import fsdp2_on_cpu
import pytest
import torch
from conftest import finished
from reference_job import FP32, JOB, SHARDED, goes_on_to_the_same_bits, layout, same_curve, weights

pytestmark = pytest.mark.skipif(not fsdp2_on_cpu.RUNS_HERE, reason="this torch's FSDP2 does not run on CPUs")
LORA = (*JOB, "--adapter", "lora", "--lora-dropout", "0", "--eval-every", "3", "--save-every", "off")


@pytest.mark.long
def test_fsdp2_adapter_has_the_usual_curve_and_exports_whole(launched):
    sharded, plain = launched("fsdp2 lora", *LORA, **SHARDED), launched("lora without dropout", *LORA)
    same_curve(plain.lines(), sharded.lines())
    for ours, theirs in zip(sharded.lines("eval_loss"), plain.lines("eval_loss"), strict=True):
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=2e-5)
    exported, expected = weights(sharded.run_dir / "final"), weights(plain.run_dir / "final")
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-5)


@pytest.mark.long
def test_evaluate_gives_the_runs_own_numbers(launched, tmp_path):
    whole = launched("fsdp2 lora", *LORA, **SHARDED)
    finished("evaluate", "math", "--model", str(whole.run_dir), run_dir=tmp_path / "evaluation", **SHARDED)
    alone, own = json.loads((tmp_path / "evaluation" / "result.json").read_text())["after"], whole.result()["after"]
    assert alone["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-5)
    for name in ("accuracy", "format_rate"):
        assert alone[name] == own[name]


# HSDP: two copies of a model that two ranks each share; test_layouts.py resumes one copy
@pytest.mark.parametrize("copies", [pytest.param(1, marks=pytest.mark.long), 2])
def test_tied_model_resumes_bit_for_bit_and_writes_one_head(launched, tmp_path, copies):
    arguments = (*JOB, "--eval-every", "off", "--save-every", "3", "--gradient-checkpointing")
    ranks = {"launcher": ("--num_processes", str(2 * copies), *FP32)}
    sharing = SHARDED | ranks | {"yaml": "hsdp" if copies > 1 else "fsdp2"}
    whole = launched(f"fsdp2 full {copies}", *arguments, **sharing)
    goes_on_to_the_same_bits(whole, tmp_path / "run", 3, **sharing)
    theirs = weights(whole.run_dir / "final")
    assert "lm_head.weight" not in theirs
    if copies > 1:
        newest = max((whole.run_dir / "checkpoints").iterdir())
        assert len([*newest.glob("rank-*.safetensors")]) == 2  # of the first copy's ranks: others hold the same
        plain = layout(launched, "plain")
        same_curve(plain.lines(), whole.lines())
        expected = weights(plain.run_dir / "final")
        for name in expected:
            torch.testing.assert_close(theirs[name], expected[name], rtol=1e-3, atol=2e-4)
