"""A step whose numbers are none is named with its examples and never learnt from, on every rank and at every stage."""

from __future__ import annotations

import json
import math

import pytest
import torch
from conftest import accel_sft
from safetensors.torch import load_file

from accel_sft import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience.anomalies import MOST_IN_A_ROW, Anomalies

BAD = 13
"""Index of the example whose rank spoils the step it is in."""
SPOILED = """
import math
from dataclasses import dataclass

import torch

import accel_sft.training.step
from accel_sft import option
from accel_sft_math import Math as Shipped

nll_sum, batch_of = accel_sft.training.step.nll_sum, accel_sft.training.step.Batching.batch

@dataclass(kw_only=True)
class Spoiled(Shipped):
    \"\"\"Math with an example that spoils the loss, or a gradient, of whatever forward it is in.\"\"\"
    how: str = option("loss", help="What is spoiled.")

    def __post_init__(self):
        seen = []

        def batch(batching, rows, *rest):
            seen[:] = [any(row.index == 13 for row in rows)]
            return batch_of(batching, rows, *rest)

        def nll(model, forward):
            value = nll_sum(model, forward)
            if not seen[0] or not model.training or not torch.is_grad_enabled():
                return value
            if self.how == "gradient":  # the loss itself is finite
                value.register_hook(lambda gradient: gradient * math.inf)
                return value
            return value + math.inf  # whose gradients are finite

        accel_sft.training.step.Batching.batch, accel_sft.training.step.nll_sum = batch, nll
"""
JOB = ("--max-steps", "8", "--global-batch-size", "10", "--train-examples", "40", "--seed", "7")
JOB += ("--validation-examples", "7", "--eval-every", "off", "--micro-batch-size", "5", "--save-every", "1")


def launched_so(tmp_path, how, yaml, precision, *more):
    (tmp_path / "own.py").write_text(SPOILED)
    options = {"yaml": yaml, "launcher": ("--mixed_precision", precision)} if yaml else {}
    return accel_sft(f"{tmp_path}/own.py:Spoiled", *JOB, "--how", how, *more, run_dir=tmp_path / "run", **options)


def held_in(folder):
    """All ranks' weights and moments of a checkpoint, by name and place."""
    return {key: tensor for path in folder.glob("rank-*") for key, tensor in load_file(path).items()}


# test_layouts.py makes such a step under every launch
@pytest.mark.parametrize(
    ("yaml", "precision", "how"), [(None, "no", "loss"), pytest.param("z3", "bf16", "gradient", marks=pytest.mark.long)]
)
def test_nonfinite_step_is_left_out_on_every_rank(tmp_path, how, yaml, precision):
    run = launched_so(tmp_path, how, yaml, precision, "--on-nonfinite", "skip", "--keep-checkpoints", "99")
    assert run.status == 0, run.output
    left_out = [json.loads(line) for line in (run.run_dir / "nonfinite.jsonl").read_text().splitlines()]
    assert len(left_out) == 2  # in each of two epochs
    assert run.result()["steps_left_out"] == 2
    assert "2 of 8 steps were not finite and left out" in run.output
    for record in left_out:
        assert BAD in record["examples"]
        assert len(record["examples"]) == 10
        assert (record["loss"] is None) == (how == "loss")
        step = record["step"]
        what = "the loss is inf" if how == "loss" else "the gradient's norm is "
        assert f"step {step}: {what}" in run.output
        if step > 1 and step + 1 not in [other["step"] for other in left_out]:
            folders = [run.run_dir / "checkpoints" / f"step-{number:06d}" for number in (step - 1, step, step + 1)]
            before, after, later = map(held_in, folders)
            assert all(torch.equal(before[key], after[key]) for key in before)
            assert not all(torch.equal(after[key], later[key]) for key in after)
    final = load_file(run.run_dir / "final" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in final.values())
    assert [line["step"] for line in run.lines()] == list(range(1, 9))
    others = [line for line in run.lines() if line["step"] not in {record["step"] for record in left_out}]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in others)


# from the start, and from a checkpoint
@pytest.mark.parametrize("save_every", ["50", pytest.param("1", marks=pytest.mark.long)])
def test_by_default_it_stops_the_run_which_may_go_on(tmp_path, save_every):
    run = launched_so(tmp_path, "loss", None, "no", "--save-every", save_every)
    assert run.status == 1
    (record,) = map(json.loads, (run.run_dir / "nonfinite.jsonl").read_text().splitlines())
    assert f"step {record['step']}: the loss is inf, and the step was not applied" in run.output
    assert run.result()["status"] == "failed"
    assert not (run.run_dir / "final").exists()
    leaving_out = (*run.arguments, "--resume", "auto", "--on-nonfinite", "skip")
    again = accel_sft(*leaving_out, run_dir=run.run_dir, **run.options)
    assert again.status == 0, again.output
    assert len(again.lines()) == 8
    steps = [json.loads(line)["step"] for line in (run.run_dir / "nonfinite.jsonl").read_text().splitlines()]
    assert len(steps) == 2  # in each of two epochs, the first of which was made twice
    assert len(set(steps)) == 2


class Example:
    def __init__(self, index):
        self.index = index


def health(tmp_path, said, on_nonfinite="stop"):
    return Anomalies(RunDir(tmp_path), on_nonfinite, "no", said.append, writes=True)


def test_a_run_that_only_leaves_out_ends(tmp_path):
    said = []
    watched = health(tmp_path, said, on_nonfinite="skip")
    for step in range(1, MOST_IN_A_ROW):
        watched.look(step, math.nan, math.nan, [Example(3)])
    with pytest.raises(UserError, match=f"the {MOST_IN_A_ROW}th in a row"):
        watched.look(MOST_IN_A_ROW, math.nan, math.nan, [Example(3)])
    assert len(said) == MOST_IN_A_ROW - 1


def test_records_that_were_damaged_are_dropped_at_a_resume(tmp_path):
    file = RunDir(tmp_path).nonfinite
    file.write_text('{"step": 3}\n{"step": 9}\n{"step": 1e999}\n{"st\n' + "[" * 100_000 + "\n")
    health(tmp_path, []).rewind(5)
    assert file.read_text() == '{"step": 3}\n'


def test_an_overflow_under_fp16_is_the_search_for_its_scale(tmp_path):
    watched = Anomalies(RunDir(tmp_path), "stop", "fp16", print, writes=True)
    watched.look(1, 2.0, math.inf, [Example(1)])
    with pytest.raises(UserError, match="the loss is nan"):
        watched.look(2, math.nan, math.inf, [Example(1)])
