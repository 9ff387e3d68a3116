"""A step whose numbers are none is named with its examples and never learnt from, on every rank and at every stage."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
from conftest import accel_sft, finished
from reference_job import own_task
from safetensors.torch import load_file

from accel_sft import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience.anomalies import MOST_IN_A_ROW, Anomalies

BAD = 13
"""Index of the example whose rank spoils the step it is in."""
SPOILED = """
def __post_init__(self):
    from accel_sft.training import step

    nll_sum, batch_of, seen = step.nll_sum, step.Batching.batch, []

    def batch(batching, rows, *rest):
        seen[:] = [any(row.index == 13 for row in rows)]
        return batch_of(batching, rows, *rest)

    def nll(model, forward):
        spoils = seen[0] and model.training and torch.is_grad_enabled()
        return nll_sum(model, forward) + (float("inf") if spoils else 0.0)

    step.Batching.batch, step.nll_sum = batch, nll
"""
"""An example spoils the loss, though not the gradients, of whatever forward it is in."""
JOB = ("--max-steps", "8", "--global-batch-size", "10", "--train-examples", "40", "--seed", "7", "--save-every", "50")
JOB += ("--validation-examples", "7", "--eval-every", "off", "--micro-batch-size", "5")


# laws/test_layouts.py makes such steps, by loss and by gradient, under every launch
def test_nonfinite_step_stops_the_run_which_may_leave_it_out(tmp_path):
    run = accel_sft(own_task(tmp_path, SPOILED), *JOB, run_dir=tmp_path / "run")
    assert run.status == 1
    (record,) = map(json.loads, (run.run_dir / "nonfinite.jsonl").read_text().splitlines())
    assert f"step {record['step']}: the loss is inf, so the step was skipped" in run.output
    assert (record["loss"], len(record["examples"]), BAD in record["examples"]) == (None, 10, True)
    assert run.result()["status"] == "failed"
    assert not (run.run_dir / "final").exists()
    again = finished(*run.arguments, "--resume", "auto", "--on-nonfinite", "skip", run_dir=run.run_dir)
    assert again.result()["steps_left_out"] == 2
    assert "2 of 8 steps were skipped as not finite" in again.output
    steps = {json.loads(line)["step"] for line in (run.run_dir / "nonfinite.jsonl").read_text().splitlines()}
    assert len(steps) == 2  # in each of two epochs, the first of which was made twice
    assert [line["step"] for line in again.lines()] == list(range(1, 9))
    assert {line["step"] for line in again.lines() if line["loss"] is None} == steps
    final = load_file(run.run_dir / "final" / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in final.values())


def test_a_run_that_only_leaves_out_ends(tmp_path):
    said = []
    watched = Anomalies(RunDir(tmp_path), "skip", "no", said.append, writes=True)
    for step in range(1, MOST_IN_A_ROW):
        watched.look(step, math.nan, math.nan, [SimpleNamespace(index=3)])
    with pytest.raises(UserError, match=f"the {MOST_IN_A_ROW}th such step in a row"):
        watched.look(MOST_IN_A_ROW, math.nan, math.nan, [SimpleNamespace(index=3)])
    assert len(said) == MOST_IN_A_ROW - 1


def test_records_that_were_damaged_are_dropped_at_a_resume(tmp_path):
    file = RunDir(tmp_path).nonfinite
    file.write_text('{"step": 3}\n{"step": 9}\n{"step": 1e999}\n{"st\n' + "[" * 100_000 + "\n")
    Anomalies(RunDir(tmp_path), "stop", "no", print, writes=True).rewind(5)
    assert file.read_text() == '{"step": 3}\n'


def test_an_overflow_under_fp16_is_the_search_for_its_scale(tmp_path):
    watched = Anomalies(RunDir(tmp_path), "stop", "fp16", print, writes=True)
    watched.look(1, 2.0, math.inf, [SimpleNamespace(index=1)])
    with pytest.raises(UserError, match="the loss is nan"):
        watched.look(2, math.nan, math.inf, [SimpleNamespace(index=1)])
