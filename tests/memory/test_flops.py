"""Model FLOPs against torch's own counter and published runs, and the share of a device's peak that a run records."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import finished
from peft import LoraConfig, get_peft_model
from planned import QWEN_7B, job_of, model
from reference_job import FP32, JOB, ONCE
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded
from accel_sft.memory.flops import model_flops, peak_flops, peaks
from accel_sft.tracking.metrics_file import mean_mfu
from accel_sft.training.predicted import Prediction
from accel_sft.training.step import TrainStep

SMALL = model("qwen2", 64, 160, 6, 4, 2, 512, tied=True)
ROWS = 2


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_model_flops_are_those_that_torch_counts(adapter):
    config = AutoConfig.for_model(**SMALL, attn_implementation="eager")
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    if adapter == "lora":
        network = get_peft_model(network, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    ids, length = torch.randint(512, (ROWS, 48)), 48
    with FlopCounterMode(display=False) as counter:
        network(input_ids=ids, labels=ids).loss.backward()
    # eager attention computes the pairs that causality hides, too
    expected = model_flops(job_of(SMALL, adapter=adapter)).total(ROWS * length, ROWS * length, ROWS * length**2)
    # nothing before the first block needs a gradient under an adapter
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03 if adapter == "lora" else 0.001)


def test_peak_is_known_by_the_devices_full_name_alone():
    known = [("NVIDIA H100 80GB HBM3", "bf16", 989e12), ("Tesla T4", "fp16", 65e12), ("Tesla T4", "bf16", None)]
    for name in ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 Laptop GPU"):
        known.append((name, "bf16", None))
    for name, precision, flops in (*known, ("NVIDIA H100 80GB HBM3", "link", None)):
        assert peak_flops(name, precision) == flops, name
    assert peaks("") is None


@pytest.mark.parametrize("layout", ["shared", "padded"])
def test_what_rows_share_counts_once_and_padding_never(layout):
    rows = [Encoded(number, [1, 2, 3, 4, *own], 4) for number, own in enumerate(([5, 6], [5, 7, 8], [9]))]
    prefixes = [tuple(row.input_ids[: end + 1]) for row in rows for end in range(len(row.input_ids))]
    counted = [ids for ids in prefixes if len(ids) > 3]  # the last common token predicts a target in each row
    counted = [*counted, *(ids for ids in {*prefixes} if len(ids) < 4)] if layout == "shared" else prefixes
    batching = Batching(layout, tokens=100, attention="mask" if layout == "padded" else "rows")
    step = SimpleNamespace(batching=batching, _divided=batching.divide(rows, 1))
    tokens, pairs = TrainStep.computed(step)
    assert tokens == len(counted)
    assert pairs == sum(len(prefix) - 0.5 for prefix in counted)  # half of the pair with itself: T^2 / 2 in all


def test_untrained_step_or_unknown_device_has_no_mfu():
    flops, step = model_flops(job_of(QWEN_7B)), SimpleNamespace(computed=lambda: (1000, 5e5))
    known = SimpleNamespace(flops=flops, peak_flops=2 * 989e12)
    expected = flops.total(1000, 900, 5e5) / (0.5 * 2 * 989e12)
    assert Prediction.mfu(known, step, 900, 0.7, 0.5) == {"mfu": expected}
    assert all(Prediction.mfu(known, step, 900, norm, 0.5) == {} for norm in (0.0, math.nan, math.inf))
    assert Prediction.mfu(SimpleNamespace(flops=flops, peak_flops=None), step, 900, 0.7, 0.5) == {}
    assert Prediction.mfu(SimpleNamespace(flops=None, peak_flops=1.0), step, 900, 0.7, 0.5) == {}
    steps = [{"mfu": 0.1, "seconds": 1.0}, {"seconds": 9.0}, {"mfu": 0.4, "seconds": 2.0}]
    assert mean_mfu(steps) == pytest.approx(0.3)
    assert mean_mfu([{"seconds": 9.0}]) is None
    assert mean_mfu([{"mfu": 0.4}]) is None  # another tool's line


def test_a_run_on_a_known_device_tells_its_mfu_everywhere(tmp_path):
    given = {"yaml": "ddp", "launcher": FP32, "run_dir": tmp_path / "run"}
    arguments = (*JOB, *ONCE, "--micro-batch-size", "2", "--batching", "padded", "--log-every", "1")
    run = finished(*arguments, **given, environment={"PLANTED_DEVICE": "NVIDIA L4"})
    flops = model_flops(job_of(json.loads((run.run_dir / "base/config.json").read_text())))
    for line in run.lines():
        least = flops.total(line["tokens"], line["supervised_tokens"], 0) / (line["seconds"] * 2 * 30e12)
        assert least < line["mfu"] < 1.3 * least  # attention is the rest
        assert line["tokens_per_second_per_device"] == line["tokens_per_second"] / 2
    result = run.result()
    assert min(line["mfu"] for line in run.lines()) <= result["mfu"] <= max(line["mfu"] for line in run.lines())
    assert result["tokens_per_second_per_device"] == pytest.approx(result["tokens_per_second"] / 2)
    assert "  MFU 0.0%" in run.output
    assert "| model FLOPs utilisation (MFU, a share of 1) |" in (run.run_dir / "report.md").read_text()
