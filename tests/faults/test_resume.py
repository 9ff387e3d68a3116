"""A run goes on where it stopped, to the bit, and under another layout than its own."""

from __future__ import annotations

import pytest
from conftest import accel_sft, finished, stopped
from reference_job import FP32, JOB, layout, resumed, same_curve
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LONG = pytest.mark.long


def test_run_resumes_under_another_launch_with_one_curve(launched, tmp_path):
    whole = layout(launched, "plain")
    arguments = (*whole.arguments, "--resume", "auto", "--micro-batch-size", "1")
    again = finished(*arguments, run_dir=stopped(whole, tmp_path / "run", 3), yaml="z3", launcher=FP32)
    layouts = "ranks 1, now 2; backend no, now deepspeed; zero stage none, now 3"
    assert f"at step 3 of 6; written under another layout ({layouts})" in " ".join(again.output.split())
    same_curve(whole.lines(), again.lines())


def test_another_precision_is_refused_with_the_way_out(launched, tmp_path):
    run_dir = stopped(layout(launched, "z2"), tmp_path / "run", 3)
    record = (run_dir / "run.json").read_text()
    again = {"run_dir": run_dir, "yaml": "z2", "launcher": ("--mixed_precision", "bf16")}
    refused = accel_sft(*layout(launched, "z2").arguments, "--resume", "auto", **again)
    assert refused.status == 1
    assert "this checkpoint has precision float32, but this launch has bf16" in refused.output
    assert "--mixed_precision no" in refused.output
    assert (run_dir / "run.json").read_text() == record, "what was refused is not recorded"


def curves(folder):
    """Steps and values of every TensorBoard curve, but for those of time and memory."""
    events = EventAccumulator(str(folder))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.split("/")[-1] in ("loss", "grad_norm", "accuracy", "epoch")]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("step", [2, pytest.param(4, marks=LONG)])
def test_resumed_run_has_the_end_best_and_curves_of_unstopped(launched, tmp_path, step):
    job = (*JOB, "--train-examples", "25", "--save-every", "2", "--eval-every", "1", "--keep-checkpoints", "9")
    whole = launched("epochs", *job)  # of two steps and a half
    run_dir = stopped(whole, tmp_path / "run", step)
    again = resumed(whole, run_dir, *job)
    for kind in ("loss", "eval_loss"):
        varying = ("seconds", "tokens_per_second", "per_device")
        reports, retold = (
            [{k: v for k, v in line.items() if not k.endswith(varying)} for line in run.lines(kind)]
            for run in (whole, again)
        )
        assert [line["step"] for line in reports] == [line["step"] for line in retold]
        for key in ("loss", "accuracy", "epoch"):
            assert [line.get(key) for line in reports] == [line.get(key) for line in retold]
    assert curves(run_dir) == curves(whole.run_dir)
    assert curves(run_dir)
    assert again.result().get("best_step") == whole.result().get("best_step")


# laws/test_layouts.py holds the same of all layouts, and of bf16
@LONG
@pytest.mark.parametrize("yaml", [None, "z2"])
def test_compiled_blocks_resume_bit_for_bit(tmp_path, yaml):
    options = {"yaml": yaml, "launcher": ("--mixed_precision", "bf16")} if yaml else {}
    job = (*JOB, "--save-every", "3", "--eval-every", "off", "--compile")
    whole = finished(*job, run_dir=tmp_path / "whole", **options)
    again = resumed(whole, stopped(whole, tmp_path / "run", 3), *job)
    assert "at step 3 of 6" in again.output
