"""What runs in a step on GPUs: kernels of attention, compiled blocks, and where the time goes."""

from __future__ import annotations

import collections
import json
import re

import pytest
from launches import BF16, FLOAT32

LONG = pytest.mark.long
pytestmark = pytest.mark.timeout(900)
ATTENTION = re.compile(
    r"(aten::_(scaled_dot_product_\w*attention\w*|(flash|cudnn|efficient)_attention_forward)|\w+::_?varlen_attn\w*)"
)
"""An operator of torch that computes attention in a forward, unless its name ends with `backward`."""


def traced(run):
    """How often each operator was called in the three steps that rank 0 of a run with --profile traced."""
    file = min((run.expect().folder / "profile").glob("rank0*.json"))
    return collections.Counter(event["name"] for event in json.loads(file.read_text())["traceEvents"] if "dur" in event)


def test_run_reports_where_its_time_went(machine):
    run = machine.train("watched", "ddp", *machine.short()).expect()
    spent = run.result["time_spent"]
    print(run.says("on rank 0 a step took [^.]+"))
    assert sum(spent["parts"].values()) == pytest.approx(spent["seconds"], rel=1e-6)
    if machine.devices:
        assert run.result["system"][0]["mean"]["gpu_percent"] > 0


@LONG
@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_no_attention_runs_in_cudnn(machine, layout):
    """It plans anew for each shape."""
    job = machine.short("--batching", layout, "--profile")
    run = machine.train(f"kernels {layout}", "ddp", *job, launcher=BF16)
    calls = {name: count for name, count in traced(run).items() if ATTENTION.fullmatch(name)}
    calls = {name: count for name, count in calls.items() if not name.endswith("backward")}
    print(calls)
    assert calls
    assert not any("cudnn" in name for name in calls)


@LONG
def test_compiled_blocks_run_compiled_while_trained(machine):
    job = machine.short("--compile", "--gradient-checkpointing", "--profile")
    run = machine.train("compiled", "ddp", *job, launcher=BF16 if machine.devices else FLOAT32)
    calls = traced(run)
    regions = sum(count for name, count in calls.items() if name.startswith("Torch-Compiled Region"))
    layers = json.loads((run.folder / "final" / "config.json").read_text())["num_hidden_layers"]
    assert regions >= layers * calls["accel_sft: forward"]
