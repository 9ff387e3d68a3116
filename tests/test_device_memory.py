"""A device that is short of memory, on real processes: embeddings above a size raise what CUDA raises."""

from __future__ import annotations

import json

import pytest
import torch
from accelerate import Accelerator
from conftest import accel_sft
from fake_plugins import install
from test_laws import FP32, JOB, ONCE, layout, same_curve
from transformers import LlamaConfig, LlamaForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.batching.layouts import Batching
from accel_sft.data.chat import Encoded
from accel_sft.io.run_dir import RunDir
from accel_sft.training.optimizer import Stepper, adamw
from accel_sft.training.step import TrainStep

CRAMPED = """
import os
from dataclasses import dataclass
from accel_sft_math import Math as Shipped

@dataclass(kw_only=True)
class Cramped(Shipped):
    \"\"\"Math on a device without room for a backward through many tokens.\"\"\"

    def dataset(self, split):
        import torch

        def look(module, inputs):
            forward = torch.is_grad_enabled() or "WHEN" == "backward"
            cramped = forward and os.environ.get("RANK", "LAST") == "LAST"
            if cramped and isinstance(module, torch.nn.Embedding) and inputs[0].numel() > ROOM:
                raise torch.OutOfMemoryError("no room")

        def look_back(module, inputs, output):
            if torch.is_grad_enabled() and isinstance(module, torch.nn.Embedding):
                output.register_hook(lambda gradient: look(module, inputs))

        if split == "train" and "WHEN" == "forward":
            torch.nn.modules.module.register_module_forward_pre_hook(look)
        elif split == "train":
            torch.nn.modules.module.register_module_forward_hook(look_back)
        return super().dataset(split)
"""
TRIED = """
from dataclasses import dataclass
from pathlib import Path
from accel_sft_math import Math as Shipped

@dataclass(kw_only=True)
class Tried(Shipped):
    \"\"\"Math whose forwards are chosen as on a GPU: forward and backward before the first step.\"\"\"

    def dataset(self, split):
        from accel_sft.batching import autotune

        least_work = autotune.Trial.least_work

        def after_memory(trial, candidates):
            sizes = trial.within_memory(candidates[-1:], (64, 128))
            assert [size.tokens for size in sizes] == [64, 128]
            Path("PROOF").touch()
            return trial.fastest(sizes) or least_work(trial, sizes)

        if split == "train":
            autotune.Trial.least_work = after_memory
        return super().dataset(split)
"""


def plugin(tmp_path, name, source):
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", f"accel-sft-{name}", f"{name} = accel_sft_{name}:{name.title()}", source)
    return {"environment": {"PYTHONPATH": str(tmp_path / "site")}, "run_dir": tmp_path / "run"}


def cramped(tmp_path, rank=0, when="forward"):
    source = CRAMPED.replace("ROOM", "40").replace("LAST", str(rank)).replace("WHEN", when)
    return plugin(tmp_path, "cramped", source)


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_step_without_room_is_repeated_in_smaller_forwards_with_the_same_curve(launched, tmp_path, when):
    run = accel_sft("cramped", *JOB[1:], *ONCE, "--micro-batch-size", "10", **cramped(tmp_path, when=when))
    assert run.status == 0, run.output
    assert "step 1: out of device memory in a forward of" in run.output
    assert "the step is repeated with at most" in run.output
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert run.result()["batching"]["tokens"] < 80  # half of what found no room, or of half of that


def test_all_ranks_repeat_the_step_where_one_of_them_finds_no_room(launched, tmp_path):
    arguments = ("cramped", *JOB[1:], *ONCE, "--micro-batch-size", "5")
    run = accel_sft(*arguments, yaml="z2", launcher=FP32, **cramped(tmp_path, rank=1))
    assert run.status == 0, run.output
    assert "step 1: out of device memory in a forward of" in run.output
    assert "the longest of its rows, training example" in run.output
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert run.result()["batching"]["tokens"] < 80


def test_ranks_that_wait_for_each_other_amid_a_forward_end_and_a_resumed_run_keeps_to_smaller_ones(launched, tmp_path):
    options = {"yaml": "z3", "launcher": FP32, **cramped(tmp_path, rank=1)}
    arguments = ("cramped", *JOB[1:], *ONCE, "--micro-batch-size", "2")
    run = accel_sft(*arguments, **options)
    assert run.status == 1
    assert "step 1: out of device memory in a forward of" in run.output
    assert f"go on with --resume auto --output-dir {tmp_path / 'run'}: it keeps to" in run.output
    run = accel_sft(*arguments, "--resume", "auto", **options)
    assert run.status == 0, run.output
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert (
        run.result()["batching"]["tokens"] == json.loads((tmp_path / "run" / "most-tokens.json").read_text())["tokens"]
    )


@pytest.mark.parametrize("content", ["", '["a"]', '"a"', '{"tokens": "many"}', '{"tokens": 0}'])
def test_a_limit_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / "most-tokens.json").write_text(content)
    with pytest.raises(UserError, match=r"most-tokens\.json: "):
        TrainStep(None, Batching("padded", 64), 0, RunDir(tmp_path), print)


def test_the_least_of_what_several_ranks_found_no_room_for_is_kept(tmp_path, monkeypatch):
    def cramped(module, inputs):
        raise torch.OutOfMemoryError("no room")

    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model, accelerator = LlamaForCausalLM(LlamaConfig(vocab_size=32, **shape)), Accelerator(cpu=True)
    model.model.embed_tokens.register_forward_pre_hook(cramped)
    monkeypatch.setattr(Stepper, "forwards_alone", False)  # ranks wait for each other amid a forward
    stepper = Stepper(accelerator, model, adamw(model, TrainConfig().resolved({})), 1.0)
    padded = Batching("padded", 0, rows=2)
    ranks = [TrainStep(stepper, padded, 0, RunDir(tmp_path), print) for _ in range(3)]
    for rank, length, kept in zip(ranks, (20, 6, 40), (20, 6, 6), strict=True):
        rows = [Encoded(index, [3] * length, 2) for index in range(2)]
        with pytest.raises(UserError, match=f"it keeps to {kept} tokens a forward"):
            rank.forward_backward(rows, 2, 1)
    assert json.loads((tmp_path / "most-tokens.json").read_text()) == {"tokens": 6}
    assert TrainStep(stepper, padded, 0, RunDir(tmp_path), print).batching.tokens == 6


@pytest.mark.parametrize("yaml", [None, "z3"])
def test_a_trial_there_and_back_leaves_no_trace(launched, tmp_path, yaml):
    proof = tmp_path / "there and back"
    options = plugin(tmp_path, "tried", TRIED.replace("PROOF", str(proof)))
    arguments = ("tried", *JOB[1:], *ONCE)
    run = accel_sft(*arguments, yaml=yaml, **({"launcher": FP32} if yaml else {}), **options)
    assert run.status == 0, run.output
    assert proof.exists()
    same_curve(layout(launched, "plain").lines(), run.lines())


def test_compiled_blocks_draw_the_same_curve_and_say_what_compiling_took(launched, tmp_path):
    run = accel_sft(*JOB, *ONCE, "--compile", run_dir=tmp_path / "run")
    assert run.status == 0, run.output
    same_curve(layout(launched, "plain").lines(), run.lines())
    assert run.result()["compile_seconds"] > 0
