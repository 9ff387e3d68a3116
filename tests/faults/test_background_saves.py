"""Checkpoints are written behind the steps that follow: what a kill, a full disk, a signal or another save meets."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from limits import limit
from places import SUPPORT, launcher
from reference_job import FP32, layout, resumed
from safetensors.torch import load_file
from transformers import Qwen2Config, Qwen2ForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.background import Checkpoints
from accel_sft.checkpoint.checkpoint import export, load, newest
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory
from accel_sft.launch.info import launch_of_this_process
from accel_sft.training.optimizer import new_optimizer

LONG = pytest.mark.long


class Held:
    """A small model, its checkpoints, and a hold on what writes their files."""

    def __init__(self, folder, monkeypatch, log=print):
        self.accelerator, self.model = Accelerator(cpu=True), torch.nn.Linear(30, 30)
        self.optimizer = new_optimizer(self.model, TrainConfig().resolved({}))
        self.run_dir, self.go_on = RunDir(folder), threading.Event()
        self.checkpoints = Checkpoints(
            self.accelerator, launch_of_this_process(), self.model, self.optimizer, self.run_dir, "2", log=log
        )
        self.write, self.fails = shards.write, False
        monkeypatch.setattr(shards, "write", self.held)

    def held(self, *arguments, **options):
        if threading.current_thread() is not threading.main_thread():
            assert self.go_on.wait(limit(60))
        return (full if self.fails else self.write)(*arguments, **options)

    def step(self):
        self.model(torch.ones(30)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        return self.model.weight.detach().clone()


@pytest.fixture
def job(tmp_path, monkeypatch):
    return Held(tmp_path, monkeypatch)


def test_background_checkpoint_has_the_weights_of_its_step(job):
    job.step()
    at_one = job.weights()
    job.checkpoints.save({"step": 1})
    job.step()
    assert not torch.equal(job.weights(), at_one)
    assert newest(job.run_dir, "auto") == (None, []), "it is not there before it is whole"
    job.go_on.set()
    job.checkpoints.finish()
    path, _ = newest(job.run_dir, "auto")
    assert load(job.accelerator, job.model, job.optimizer, path)["step"] == 1
    assert torch.equal(job.weights(), at_one)


def test_save_waits_for_the_one_before(job):
    job.checkpoints.save({"step": 1})
    threading.Timer(0.5, job.go_on.set).start()
    job.checkpoints.save({"step": 2})
    assert job.run_dir.checkpoint(1).is_dir()
    job.checkpoints.finish()
    assert [path.name for path in job.run_dir.all_checkpoints()] == ["step-000001", "step-000002"]


def test_export_is_complete_before_the_checkpoint_that_records_it(job):
    go_on, seen = threading.Event(), []
    job.go_on.set()
    job.checkpoints.export(lambda: seen.append(go_on.wait(limit(60)) and newest(job.run_dir, "auto")))
    job.checkpoints.save({"step": 1})
    time.sleep(0.5)
    assert newest(job.run_dir, "auto") == (None, [])
    threading.Timer(0.5, go_on.set).start()
    with pytest.raises(ZeroDivisionError), job.checkpoints:  # a run that fails lets what it began become complete
        raise ZeroDivisionError
    assert seen == [(None, [])]
    assert newest(job.run_dir, "auto") == (job.run_dir.checkpoint(1), [])


FULL = "the disk is full; free space, then go on with --resume auto"


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def small_model():
    config = Qwen2Config(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    return Qwen2ForCausalLM(config), SimpleNamespace(save_pretrained=lambda folder: None)


def test_background_export_has_the_weights_of_its_step(job, tmp_path):
    model, tokenizer = small_model()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    held = threading.Event()
    job.checkpoints._worker.submit(held.wait, limit(60))
    export(job.accelerator, model, tokenizer, tmp_path / "best", "card", behind=job.checkpoints)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    assert not (tmp_path / "best").exists()
    held.set()
    job.checkpoints.finish()
    exported = load_file(tmp_path / "best" / "model.safetensors")
    assert all(torch.equal(exported[name], weight) for name, weight in before.items())


def test_full_disk_ends_the_run_at_the_next_step(job):
    job.go_on.set()
    job.checkpoints.save({"step": 1})
    job.checkpoints.finish()
    job.fails = True
    job.go_on.clear()
    job.checkpoints.save({"step": 2})
    assert not job.checkpoints.failed
    job.go_on.set()
    job.checkpoints._written.exception()
    assert job.checkpoints.failed
    for call in (job.checkpoints.finish, lambda: job.checkpoints.save({"step": 3})):
        with pytest.raises(UserError, match=FULL):
            call()
    assert newest(job.run_dir, "auto") == (job.run_dir.checkpoint(1), [])


def test_checkpoint_is_written_where_memory_cannot_be_pinned(tmp_path, monkeypatch):
    """As cudaHostAlloc refuses it, on this rank; the line is once for all."""
    empty, requests, lines = torch.empty, [], []

    def refusing(*shape, pin_memory=False, **options):
        requests.append(pin_memory)
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later")
        return empty(*shape, **options)

    run = Held(tmp_path, monkeypatch, lines.append)
    run.go_on.set()
    run.step()
    monkeypatch.setattr(shards, "_on_gpu", lambda tensor: True)
    monkeypatch.setattr(torch, "empty", refusing)
    for step in (1, 2):
        run.checkpoints.save({"step": step})
    run.checkpoints.finish()
    assert requests.count(True) == 1
    assert [line for line in lines if "cannot be pinned (CUDA error: out of memory" in line] == lines[:1] == lines
    assert newest(run.run_dir, "auto")[0] == run.run_dir.checkpoint(2)


def test_without_room_for_a_copy_training_waits_and_says_so(tmp_path, monkeypatch):
    said = []
    job = Held(tmp_path, monkeypatch, log=said.append)
    job.go_on.set()
    needed = 12 * 930 * 4 // 3
    monkeypatch.setattr(host_memory, "free_bytes", lambda: needed - 1)
    assert job.checkpoints.save({"step": 1}).is_dir()
    assert job.checkpoints._memory is None
    export(job.accelerator, *small_model(), tmp_path / "best", "card", behind=job.checkpoints)
    assert (tmp_path / "best" / "model.safetensors").is_file()
    job.checkpoints.save({"step": 2})
    message = "host memory: a copy of {} takes 0.0 MiB, but only 0.0 MiB are free; training waits"
    for line, what in zip(said, ("a checkpoint", "exported weights"), strict=True):
        assert line.startswith(message.format(what))
    monkeypatch.setattr(host_memory, "free_bytes", lambda: needed)
    roomy = Held(tmp_path, monkeypatch, log=said.append)
    roomy.checkpoints.save({"step": 3})
    roomy.go_on.set()
    roomy.checkpoints.finish()
    assert len(said) == 2


def with_held_writes(what, run_dir, job, yaml=None):
    """The job, saved after every second step; something happens to the checkpoint or best/ of step 4 behind step 5."""
    command = launcher(yaml, *FP32) if yaml else [sys.executable]
    command += ["-m", "held_writes", what, "4", "5", *job, "--save-every", "2", "--output-dir", str(run_dir)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(SUPPORT), os.environ["PYTHONPATH"]))}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["plain", pytest.param("z2", marks=LONG), pytest.param("z3", marks=LONG)])
@pytest.mark.parametrize("what", ["kill", pytest.param("full", marks=LONG), pytest.param("SIGTERM", marks=LONG)])
def test_run_whose_checkpoint_fails_behind_its_steps_resumes_alike(launched, tmp_path, name, what):
    whole, run_dir = layout(launched, name), tmp_path / "run"
    ended = with_held_writes(what, run_dir, whole.arguments, whole.options["yaml"])
    said = ended.stdout + ended.stderr
    assert ended.returncode, said
    checkpoint, _ = newest(RunDir(run_dir), "auto")
    if what == "SIGTERM":
        assert "stopped by SIGTERM after step" in said
        assert (run_dir / "checkpoints" / "step-000004").is_dir()
    else:
        assert checkpoint.name == "step-000002"
        assert (run_dir / "checkpoints" / ".step-000004.partial").is_dir()
    if what == "full":
        assert said.count(f"Error: {run_dir}: {FULL}") == 1
        assert "Traceback" not in said.split("Error: ")[0]
    again = resumed(whole, run_dir, *whole.arguments)
    assert f"resumed {checkpoint} at step {int(checkpoint.name[-6:])} of 6" in " ".join(again.output.split())


@pytest.mark.parametrize("name", ["plain", pytest.param("z2", marks=LONG), pytest.param("z3", marks=LONG)])
@pytest.mark.parametrize("what", ["best", pytest.param("full-best", marks=LONG)])
def test_run_whose_best_weights_fail_has_those_before_and_resumes(launched, tmp_path, name, what):
    whole, run_dir = layout(launched, name), tmp_path / "run"
    job = (*whole.arguments, "--eval-every", "2")
    ended = with_held_writes(what, run_dir, job, whole.options["yaml"])
    said = ended.stdout + ended.stderr
    assert ended.returncode, said
    assert "of step 2" in (run_dir / "best" / "README.md").read_text()
    load_file(run_dir / "best" / "model.safetensors")
    checkpoint, _ = newest(RunDir(run_dir), "auto")
    assert checkpoint.name == "step-000002", "step 4's would know a best step whose weights are not there"
    if what == "full-best":
        assert said.count(f"Error: {run_dir}: {FULL}") == 1
    resumed(whole, run_dir, *job)
    best = json.loads((run_dir / "result.json").read_text())["best"]["step"]
    assert f"of step {best}" in (run_dir / "best" / "README.md").read_text()
    assert not (run_dir / ".best.partial").exists()
