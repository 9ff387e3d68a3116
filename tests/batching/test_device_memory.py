"""A device that is short of memory, on real processes: embeddings above a size raise what CUDA raises."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import os

import pytest
import torch
from accelerate import Accelerator
from conftest import accel_sft, finished
from fake_memory import WAYS, Device
from reference_job import FP32, JOB, ONCE, layout, own_task, same_curve
from torch._dynamo.exc import BackendCompilerFailed
from transformers import LlamaConfig, LlamaForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.batching import choice
from accel_sft.batching.layouts import Batching
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.commands import train
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.info import read_launch
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_shape
from accel_sft.training.optimizer import Stepper, new_optimizer
from accel_sft.training.step import TrainStep

CRAMPED = """
def dataset(self, split):
    def look(module, inputs):
        cramped = torch.is_grad_enabled() and os.environ["RANK"] == "1"
        if cramped and isinstance(module, torch.nn.Embedding) and inputs[0].numel() > 40:
            raise torch.OutOfMemoryError("no room")

    if split == "train":
        torch.nn.modules.module.register_module_forward_pre_hook(look)
    return super().dataset(split)
"""


@pytest.mark.long
def test_ranks_sharing_weights_end_and_resume_with_smaller_forwards(launched, tmp_path):
    options = {"run_dir": tmp_path / "run", "yaml": "z3", "launcher": FP32}
    arguments = (own_task(tmp_path, CRAMPED), *JOB[1:], *ONCE, "--micro-batch-size", "2")
    run = accel_sft(*arguments, **options)
    assert run.status == 1
    assert "step 1: out of device memory in a forward of" in run.output
    assert f"continue with --resume auto --output-dir {tmp_path / 'run'}: forwards will have at most" in run.output
    run = finished(*arguments, "--resume", "auto", **options)
    same_curve(layout(launched, "plain").lines(), run.lines())
    limit = json.loads((tmp_path / "run" / "most-tokens.json").read_text())
    assert run.result()["batching"]["tokens"] == limit["tokens"]


def test_smallest_size_without_room_of_all_ranks_is_kept(tmp_path, monkeypatch):
    def cramped(module, inputs):
        raise torch.OutOfMemoryError("no room")

    model, accelerator = tiny_llama(), Accelerator(cpu=True)
    model.model.embed_tokens.register_forward_pre_hook(cramped)
    monkeypatch.setattr(Stepper, "forwards_alone", False)  # ranks wait for each other amid a forward
    stepper = Stepper(accelerator, model, new_optimizer(model, TrainConfig().resolved({})), 1.0)
    padded = Batching("padded", 0, rows=2)
    ranks = [TrainStep(stepper, padded, 0, RunDir(tmp_path), print) for _ in range(3)]
    for rank, length, smallest in zip(ranks, (20, 6, 40), (20, 6, 6), strict=True):
        rows = [Encoded(index, [3] * length, 2) for index in range(2)]
        with pytest.raises(UserError, match=f"forwards will have at most {smallest} tokens"):
            rank.forward_backward(rows, 2, 1)
    assert json.loads((tmp_path / "most-tokens.json").read_text()) == {"tokens": 6}
    assert TrainStep(stepper, padded, 0, RunDir(tmp_path), print).batching.tokens == 6


def tiny_llama():
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))


def job(model):
    """A trial of it, its optimizer, and the examples of a step."""
    config, accelerator = TrainConfig().resolved({}), Accelerator(cpu=True)
    examples = [Encoded(index, [(7 * index + at) % 256 for at in range(20 + index)], 4) for index in range(16)]
    stepper = Stepper(accelerator, model, new_optimizer(model, config), 1.0)
    counted = Job(shape=read_shape(model.config.to_dict(), "model"), launch=read_launch({}, []), device="cpu")
    return Trial(accelerator, model, config, examples, 0, job=counted), stepper, examples


def trained(stepper, batching, examples, folder):
    """Two steps of these forwards: their losses, and the batching at the end."""
    steps, losses = TrainStep(stepper, batching, 0, RunDir(folder), print), []
    while len(losses) < 2:
        share, oom = steps.forward_backward(examples, sum(row.supervised_tokens for row in examples), 1)
        if oom.tokens:
            steps.retry_smaller(oom, 1)
            continue
        losses.append(share.item())
        stepper.update(1)
    return losses, steps.batching


@pytest.mark.parametrize("way", [*WAYS, "backward"])
def test_step_without_room_is_repeated_in_halves(tmp_path, way, capsys):
    _, stepper, examples = job(tiny_llama())
    expected, _ = trained(stepper, Batching("padded", 512), examples, tmp_path)

    def full(gradient):
        if gradient[..., 0].numel() > 200:
            raise torch.OutOfMemoryError("no room")

    with contextlib.nullcontext() if way == "backward" else Device(3 * 2**20, way):
        _, stepper, examples = job(tiny_llama())
        if way == "backward":
            embedding = stepper.model.get_input_embeddings()
            embedding.register_forward_hook(lambda module, inputs, output: output.register_hook(full) and None)
        losses, batching = trained(stepper, Batching("padded", 512), examples, tmp_path)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert batching.tokens < 512
    output = capsys.readouterr().out
    assert "step 1: out of device memory in a forward of" in output
    assert "its longest row, training example" in output


def test_trial_there_and_back_leaves_no_trace():
    """Neither gradients nor random state nor mode; the first step then learns what it would without a trial."""
    trial, _, examples = job(tiny_llama().eval())
    state = torch.get_rng_state()
    assert trial.run(Batching("padded", 512), examples)[1]
    assert torch.equal(torch.get_rng_state(), state)
    assert not trial.model.training
    assert all(parameter.grad is None for parameter in trial.model.parameters())


def test_another_error_of_a_device_is_no_shortage(tmp_path):
    _, stepper, examples = job(tiny_llama())

    def broken(module, inputs):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    stepper.model.model.embed_tokens.register_forward_pre_hook(broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        trained(stepper, Batching("padded", 64), examples, tmp_path)


def test_reserved_is_what_the_first_update_still_allocates():
    """Moments and more, of what is trained."""
    model = tiny_llama()
    trial, parameters = job(model)[0], model.num_parameters()
    everything = trial.reserved()
    assert everything >= 8 * parameters
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    some = dataclasses.replace(trial, job=dataclasses.replace(trial.job, train_only="layers.1"))
    share = sum(p.numel() for p in model.parameters() if p.requires_grad) / parameters
    assert some.reserved() == pytest.approx(share * everything, rel=0.01)


def test_estimate_bounds_the_forwards_of_a_gpu(monkeypatch):
    trial, padded = job(tiny_llama())[0], [Batching("padded", 0)]

    def sizes(free, trial=trial):
        monkeypatch.setattr(choice, "free_bytes", lambda device: free)
        return [batching.tokens for batching in choice.fitting(trial, padded)]

    assert sizes(math.inf) == [*padded[0].way.cpu_tokens], "a CPU's"
    assert sizes(0) == [1024]  # the smallest, whatever is predicted
    some = [len(sizes(mebibytes * 2**20)) for mebibytes in (16, 32, 64, 128)]
    assert some == sorted(some)
    assert len(set(some)) > 2
    without = dataclasses.replace(trial, job=None)
    assert sizes(2**40, without) == [1024]


@pytest.mark.long  # for each batching other code is compiled
def test_compiled_blocks_draw_the_same_curve_and_record_time(launched, tmp_path):
    forwards = ("--batching", "shared", "--micro-batch-size", "10")
    run = finished(*JOB, *ONCE, "--compile", *forwards, run_dir=tmp_path / "run")
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert run.result()["compile_seconds"] > 0


def test_a_full_disk_below_compiled_code_is_not_the_runs(tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "kept")

    with pytest.raises(BackendCompilerFailed) as raised:
        torch.compile(torch.neg, backend=full)(torch.ones(1))
    error = train._explained(RunDir(tmp_path), None, raised.value)
    assert "TORCHINDUCTOR_CACHE_DIR" in str(error)
    assert str(tmp_path) not in str(error)
