"""Checks of tests/gpu on what runs in a step: kernels of attention, compiled blocks, and where the time goes."""

from __future__ import annotations

import collections
import json
import re

from launches import Failed, Machine, Run
from suite import BF16, FLOAT32, check, hold, seen, watched


def traced(run: Run) -> collections.Counter[str]:
    """How often each operator was called in the three steps that rank 0 of a run with --profile traced."""
    file = min((run.expect().folder / "profile").glob("rank0*.json"))
    return collections.Counter(event["name"] for event in json.loads(file.read_text())["traceEvents"] if "dur" in event)


@check("watching", value=3, seconds=40)
def watching(machine: Machine) -> str:
    """A run says where its time went, and its GPU's use."""
    run = machine.train("watched", "ddp", *machine.short()).expect()
    spent = run.result["time_spent"]
    sentence = next((line for line in run.output.splitlines() if line.startswith("on rank 0 a step took ")), "")
    if not sentence or abs(sum(spent["parts"].values()) - spent["seconds"]) > 1e-6 * spent["seconds"]:
        raise Failed(f"{sentence!r}: {spent}")
    if not machine.devices:
        return sentence
    rank, *_ = run.result["system"]
    if "gpu_percent" not in rank["mean"]:
        raise Failed(f"readings {rank['mean']}")
    return f"{sentence}; use {rank['mean']['gpu_percent']:.0f}%"


@check("attention kernels", value=6, seconds=70)
def attention_kernels(machine: Machine) -> str:
    """No attention of shared, packed or padded rows runs in cuDNN, which plans for each shape."""
    results = []
    for name in ("shared", "packed", "padded"):
        job = machine.short("--batching", name, "--profile")
        launch = {"launcher": BF16, **watched(machine, f"kernels {name}", "WatchedSums")}
        run = machine.train(f"kernels {name}", "ddp", *job, **launch)
        calls = traced(run)
        kinds = {operator: count for operator, count in sorted(calls.items()) if _is_attention(operator)}
        results.append(f"{name}: " + ", ".join(f"{key.partition('::')[2]} {n}" for key, n in kinds.items()))
        if not kinds:
            raise Failed(f"{name}: no operator of attention is in the trace")
        hold(not any("cudnn" in operator for operator in kinds), "; ".join(results))
    switches = seen(run)
    sentence = f"cuDNN's is {'allowed' if switches['cudnn_attention'] else 'off'}"
    results.append(sentence + ", the last choice" * switches["cudnn_attention_last"])
    # answers, which no trace shows, may use it
    good = not machine.devices or not switches["cudnn_attention"] or switches["cudnn_attention_last"]
    return hold(good, "; ".join(results))


def _is_attention(operator: str) -> bool:
    """Whether it is an operator of torch that computes attention in a forward."""
    return not operator.endswith("backward") and bool(
        re.fullmatch(
            r"(aten::_(scaled_dot_product_\w*attention\w*|(flash|cudnn|efficient)_attention_forward)|\w+::_?varlen_attn\w*)",
            operator,
        )
    )


@check("compiled", value=3, seconds=150)
def compiled(machine: Machine) -> str:
    """With --compile and --gradient-checkpointing the blocks run compiled while they are trained."""
    job = machine.short("--compile", "--gradient-checkpointing", "--profile")
    run = machine.train("compiled", "ddp", *job, launcher=BF16 if machine.devices else FLOAT32)
    calls = traced(run)
    regions = sum(count for name, count in calls.items() if name.startswith("Torch-Compiled Region"))
    layers = json.loads((run.folder / "final" / "config.json").read_text())["num_hidden_layers"]
    forwards = calls["accel_sft: forward"]
    sentence = f"{regions} calls of compiled code in {forwards} forwards of {layers} blocks"
    return hold(regions >= layers * forwards, f"{sentence}, compile_seconds {run.result['compile_seconds']:.0f}")
