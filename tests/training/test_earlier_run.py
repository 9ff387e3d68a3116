"""What an earlier version left goes on as it would have gone on then: a run that was stopped, and a task."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import finished
from fake_plugins import install
from places import STORED_RUNS
from safetensors.torch import load_file

JOB = ("math", "--model", "model", "--train-examples", "40", "--validation-examples", "7", "--max-steps", "6")
JOB += ("--global-batch-size", "10", "--learning-rate", "0.01", "--max-length", "128", "--save-every", "3")
JOB += ("--eval-every", "3", "--seed", "5", "--keep-checkpoints", "5", "--output-dir", "run")
VERSIONS = sorted(path.name for path in STORED_RUNS.iterdir())


def test_there_is_a_run_of_an_earlier_version():
    assert "0.1.0" in VERSIONS


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_of_an_earlier_version_goes_on(version, tmp_path, monkeypatch):
    shutil.copytree(STORED_RUNS / version, tmp_path / "begun")
    monkeypatch.chdir(tmp_path / "begun")
    run = finished(*JOB, "--resume", "auto")
    assert "step-000003 at step 3 of 6" in run.output
    actual, expected = (
        [json.loads(line) for line in Path(name).read_text().splitlines()]
        for name in ("run/metrics.jsonl", "metrics-of-the-whole-run.jsonl")
    )
    assert [line["step"] for line in actual] == [line["step"] for line in expected]
    for line, other in zip(actual, expected, strict=True):
        for key in line.keys() & {"loss", "grad_norm", "eval_loss", "accuracy", "learning_rate", "supervised_tokens"}:
            assert math.isclose(line[key], other[key], rel_tol=1e-4, abs_tol=1e-6), (line["step"], key)
    weights, whole = load_file("run/final/model.safetensors"), load_file("final.safetensors")
    assert weights.keys() == whole.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("version", VERSIONS)
def test_task_of_an_earlier_version_runs_and_passes_its_test(version, tmp_path):
    """It is what `accel-sft new-task before` wrote then."""
    site = tmp_path / "site"
    shutil.copytree(STORED_RUNS / version / "task", site)
    source = (site / "accel_sft_before.py").read_text()
    install(site, "accel-sft-before", "before = accel_sft_before:BeforeTask", source)
    installed = {"PYTHONPATH": str(site)}
    run = finished("before", "--max-steps", "2", run_dir=tmp_path / "run", environment=installed)
    assert run.result()["after"].keys() >= {"accuracy", "eval_loss"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(site / "tests")]
    tested = subprocess.run(command, env={**os.environ, **installed}, cwd=site, capture_output=True, text=True)
    assert tested.returncode == 0, tested.stdout
    assert "skipped" not in tested.stdout
