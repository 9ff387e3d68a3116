"""Law 1 behind a cache: rows that go on from one forward of their prefix learn what rows that repeat it learn."""

from __future__ import annotations

import copy
import json

import architectures
import pytest
import torch
from accelerate import Accelerator
from conftest import accel_sft, stopped
from forwards import CPU, computed_tokens, rows
from transformers import AutoModelForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.batching.choice import choose_batching
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.models import prefix_attention

ROWS = rows(12, instruction=70, longest=30, vocabulary=250)
INIT = {"qwen3_5_text": 0.05, "gemma2": 0.05, "falcon_h1": 0.05, "olmo_hybrid": 0.02}
"""Deviations of random weights where 0.1, as in the other families, makes of rounding, in ten steps, a difference that
shows: padded rows in forwards of two sizes then differ as much."""
TAKES = ("lfm2", "qwen3_5_text", "granitemoehybrid", "gpt_oss", "gemma2", "falcon_h1", "zamba2", "nemotron_h")
TAKES += ("bamba", "olmo_hybrid", "mamba2")
CANNOT = {
    "jamba": "its loss is not that of single rows",
    "minimax": "the model's forward fails",
    "falcon_mamba": "its loss is not that of single rows",
}


class Tokenizer:
    eos_token_id, pad_token_id = 1, 0

    def __len__(self):
        return 256


def make(family):
    torch.manual_seed(0)
    config = architectures.configuration(family, Tokenizer())
    config.initializer_range = INIT.get(family, 0.1)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()


def chosen(model, before=None, **settings):
    trial = Trial(Accelerator(cpu=True), model, TrainConfig(**settings).resolved({}), ROWS, 0)
    return choose_batching(trial, before=before)


def curve(model, batching, steps=10):
    """Loss and norm of the gradient in each of some steps of AdamW."""
    model = copy.deepcopy(model)
    optimizer, supervised = torch.optim.AdamW(model.parameters(), lr=1e-3), sum(row.supervised_tokens for row in ROWS)
    losses = []
    for _ in range(steps):
        total = 0.0
        for forward in batching.divide(ROWS, 1)[0]:
            loss = nll_sum(model, batching.batch(forward, 0, CPU)) / supervised
            loss.backward()
            total += loss.item()
        losses += [total, torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def long_but(first, names):
    return [first, *(pytest.param(name, marks=pytest.mark.long) for name in names if name != first)]


@pytest.mark.parametrize("family", long_but("lfm2", TAKES))
def test_steps_behind_a_cache_equal_rows_repeating_the_prefix(family):
    model = make(family)
    batching, line = chosen(model)
    assert (batching.layout, batching.attention) == ("shared", "cache"), line
    assert "not packed: " in line  # with states or windows of others, or attention that takes no mask
    assert computed_tokens(batching, ROWS) < computed_tokens(Batching("padded", 1024), ROWS) / 2
    expected = curve(model, Batching("padded", 4096))
    assert curve(model, Batching("shared", 300, attention="cache")) == pytest.approx(expected, rel=2e-5)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert chosen(model, gradient_checkpointing=True)[0].attention == "cache"
    assert curve(model, batching) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("family", long_but("jamba", CANNOT))
def test_layer_that_cannot_continue_a_cache_is_detected(family):
    batching, line = chosen(make(family))
    assert batching.layout == "padded"
    assert f"; and with a cached prefix: {CANNOT[family]}" in line.partition("not packed: ")[0]


def test_state_cut_off_from_its_backward_is_detected(monkeypatch):
    def cut_off(value, rows, real=prefix_attention._for_rows):
        state = real(value, rows)
        return state.detach() if isinstance(state, torch.Tensor) and state.ndim == 3 else state

    monkeypatch.setattr(prefix_attention, "_for_rows", cut_off)
    batching, line = chosen(make("lfm2"))
    assert batching.layout == "padded"
    assert "with a cached prefix: its gradient is not that of padded rows (relative difference " in line


def test_rows_are_padded_where_no_backward_can_be_tried(monkeypatch):
    model = make("lfm2")
    assert "with a cached prefix: --compile would compile" in chosen(model, compile=True)[1]
    monkeypatch.setattr("accel_sft.batching.verify.forwards_alone", lambda accelerator: False)
    batching, line = chosen(model)
    assert batching.layout == "padded"
    assert "with a cached prefix: its backward cannot be tried if ranks share the weights" in line


JOB = ("--max-steps", "5", "--eval-every", "off", "--save-every", "3", "--global-batch-size", "24")
JOB += ("--dtype", "float32", "--train-examples", "48", "--validation-examples", "4")


@pytest.mark.long
@pytest.mark.parametrize(("yaml", "adapter"), [("ddp", "none"), ("z2", "lora")])
def test_ranks_and_resume_keep_the_curve_behind_a_cache(yaml, adapter, tmp_path):
    model = architectures.make(tmp_path / "model", "lfm2")
    job = ("math", *JOB, "--model", str(model), "--adapter", adapter)
    sharing = {"yaml": yaml, "launcher": ("--mixed_precision", "no")}
    alone = accel_sft(*job, run_dir=tmp_path / "alone")
    several = accel_sft(*job, run_dir=tmp_path / "several", **sharing)
    for run in (alone, several):
        assert "what rows share, in a cache" in " ".join(run.output.split()), run.output[-3000:]
    for one, other in zip(alone.lines(), several.lines(), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-5)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-5)
    again = accel_sft(*job, "--resume", "auto", run_dir=stopped(several, tmp_path / "again", 3), **sharing)
    assert "per forward, as before" in " ".join(again.output.split()), again.output[-3000:]
    assert [line["loss"] for line in again.lines()] == [line["loss"] for line in several.lines()]
    record = json.loads((again.run_dir / "batching.json").read_text())["chosen"]
    assert (record["layout"], record["attention"]) == ("shared", "cache")
