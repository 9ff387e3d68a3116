"""The same command gives the same bits with the default options, whatever trials of a batching measure (law 3)."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig

import psutil
import pytest
import torch
from conftest import accel_sft
from fake_plugins import install
from limits import wait_for
from places import CONFIGS
from reference_job import FP32, JOB, ONCE, layout, same_curve
from safetensors.torch import load_file
from stopping import steps_done

LYING = """
import os, sys, time
from dataclasses import dataclass
from accel_sft_math import Math as Shipped

real, looks = time.perf_counter, 0

def lying():
    # where a batching is tried, the clock stands still for one layout, and goes on by a fifth of a second for others
    global looks
    caller = sys._getframe(1)
    if caller.f_code.co_name != "_seconds" or "batching" not in caller.f_locals:
        return real()
    looks += 1
    return 0.0 if caller.f_locals["batching"].layout == os.environ["QUICK"] else 0.2 * looks

time.perf_counter = lying

@dataclass(kw_only=True)
class Lying(Shipped):
    \"\"\"Math under that clock.\"\"\"
"""
DROPOUT = ("lying", "--adapter", "lora", "--lora-dropout", "0.1", "--max-steps", "20", "--global-batch-size", "10")
DROPOUT += ("--train-examples", "500", "--seed", "7", "--eval-every", "off", "--save-every", "20")


@pytest.fixture
def disturbed(tmp_path):
    """`disturbed(quick)`: an environment with a task under which trials find that layout the quickest, and in which
    nothing is kept yet."""
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "accel-sft-lying", "lying = accel_sft_lying:Lying", LYING)

    def environment(quick):
        path = os.pathsep.join(filter(None, (str(tmp_path / "site"), os.environ.get("PYTHONPATH"))))
        return {"PYTHONPATH": path, "QUICK": quick, "ACCEL_SFT_CACHE": str(tmp_path / f"cache-{quick}")}

    return environment


def same_weights(expected, got, name):
    expected, got = (load_file(folder / "final" / f"{name}.safetensors") for folder in (expected, got))
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[key], got[key]) for key in expected)


def test_one_process_ends_with_the_same_bits_whatever_trials_would_measure(launched, tmp_path, disturbed):
    first = layout(launched, "plain with recomputed activations")
    arguments = ("lying", *first.arguments[1:])
    again = accel_sft(*arguments, run_dir=tmp_path / "run", environment=disturbed("padded"))
    assert again.status == 0, again.output
    same_weights(first.run_dir, tmp_path / "run", "model")


def test_two_ranks_with_dropout_that_are_killed_before_a_checkpoint_go_on_to_the_same_bits(tmp_path, disturbed):
    options = {"yaml": "ddp", "launcher": FP32}
    whole = accel_sft(*DROPOUT, run_dir=tmp_path / "whole", environment=disturbed("packed"), **options)
    assert whole.status == 0, whole.output
    run_dir = tmp_path / "run"
    command = [sysconfig.get_path("scripts") + "/accelerate-launch", "--config_file", str(CONFIGS / "ddp.yaml"), *FP32]
    command += ["--main_process_port", "0", "-m", "accel_sft"]
    command += [*DROPOUT, "--output-dir", str(run_dir)]
    with (tmp_path / "log").open("wb") as log:
        environment = {**os.environ, **disturbed("padded")}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            wait_for(lambda: steps_done(run_dir) >= 1 or process.poll() is not None)
        finally:
            family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
    psutil.wait_procs(family)
    assert steps_done(run_dir) >= 1, (tmp_path / "log").read_text()
    assert not list(run_dir.glob("checkpoints/*"))
    assert (run_dir / "batching.json").is_file()
    resumed = accel_sft(*DROPOUT, "--resume", "auto", run_dir=run_dir, environment=disturbed("padded"), **options)
    assert resumed.status == 0, resumed.output
    assert "a forward, as before" in " ".join(resumed.output.split())
    same_weights(whole.run_dir, run_dir, "adapter_model")
    assert [line["loss"] for line in resumed.lines()] == [line["loss"] for line in whole.lines()]


def test_deterministic_asks_libraries_for_kernels_that_repeat_every_bit(launched, tmp_path):
    """In a process of its own, for it holds for all that follows."""
    code = "from accel_sft.launch.accelerator import create_accelerator; from accel_sft.api.config import TrainConfig\n"
    code += "from accel_sft.launch.read import read_launch\n"
    code += "import os, torch; create_accelerator(TrainConfig(deterministic=True), read_launch())\n"
    code += "print(torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),"
    code += " os.environ['CUBLAS_WORKSPACE_CONFIG'])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "False", ":4096:8"]
    run = accel_sft(*JOB, *ONCE, "--deterministic", run_dir=tmp_path / "run")
    assert run.status == 0, run.output
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert json.loads((tmp_path / "run" / "run.json").read_text())["config"]["deterministic"] is True
