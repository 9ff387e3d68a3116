"""`accel-sft plan --probe`: two real steps on this machine."""

import json

import pytest
from conftest import accel_sft

from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.estimate import Estimate
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_shape
from accel_sft.models.tiny import TINY_SHAPE, TINY_VOCABULARY
from accel_sft.tools.plan.probe import probe

GIB = 2**30


@pytest.fixture
def alone(tmp_path):
    """A launch file of one process."""
    file = tmp_path / "alone.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 1\nuse_cpu: true\n")
    return file


def test_a_probe_measures_two_real_steps(alone):
    done = accel_sft("plan", "math", "--gpus", "0", "--launch", str(alone), "--probe", "--json")
    assert done.status == 0, done.output
    closed, probed = json.loads(done.output[done.output.index("{") :])["answers"]["alone"]
    assert [closed["method"], probed["method"]] == ["closed form", "probe"]
    assert {*probed["host"]} == {"load", "shard", "first_step", "step", "export"}
    assert 0.2 < probed["host"]["step"]["measured"] / GIB < 2
    assert not probed["failure"]
    assert "measured in two steps" in probed["notes"][0]


def test_a_probe_that_fails_is_an_answer(alone, tmp_path):
    shape = read_shape({"model_type": "qwen2", "vocab_size": TINY_VOCABULARY, **TINY_SHAPE}, "tiny")
    asked = Job(shape=shape, launch=assume_precision(launch_of_yaml(alone), bf16=True), device="cpu")
    failed = probe(asked, alone, ["math", "--model", str(tmp_path / "nothing")])
    assert "no such folder" in failed.failure
    assert not failed.fits(None, None)
    late = probe(asked, alone, ["math"], limit_seconds=1)
    assert late.failure == "time limit: not done after 0.0166667 minutes"


def test_a_probe_for_another_machine_is_refused_before_the_table():
    done = accel_sft("plan", "math", "--gpus", "64", "--gpu-memory", "24", "--probe")
    assert done.status == 1
    (line,) = done.output.splitlines()
    assert line.startswith("Error: --probe: the plan is for 64 GPUs of 24 GiB, ")


def test_a_failure_does_not_fit():
    assert Estimate(method="probe", device={}, host={}).fits(1, 1)
    assert not Estimate(method="probe", device={}, host={}, failure="out of memory").fits(None, None)
