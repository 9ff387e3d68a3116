"""Where a step's time goes, by kernel and by Python: the real loop in one process, float32, under torch's profiler.

    python benchmarks/kernels.py [--shape NAME ...] [--steps 5] [--smoke]

Each operator's own time counts, without the operators called within it. In forward and backward, time counts by the
kind of operator; time between operators counts for autograd or Python. All time in the optimizer's part of the step is
`optimizer`, and time outside of forward, backward and optimizer is `ours`. Profiling slows a step with many small
operators, so the step's time without the profiler is printed above the table.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import shapes
import smoke

HERE = Path(__file__).parent
OPERATORS = (
    ("matrix products", r"aten::(linear|matmul|mm|addmm|bmm|baddbmm|addbmm)"),
    ("attention", r"aten::.*attention.*"),
    ("loss", r"aten::(_?log_softmax.*|nll_loss.*|cross_entropy.*|_softmax.*)"),
    ("copies, gathers and fills", r"aten::(copy_|clone|cat|index.*|embedding.*|gather|scatter.*|repeat.*|fill_|zero_)"),
    ("norms, activations and rotary", r"aten::(mul|add|sub|div|neg|pow|mean|rsqrt|silu|sum|sigmoid|exp|square).*"),
    ("views and allocations", r"aten::.*"),
)
"""Kinds of operators: an operator is of the first kind whose pattern matches its whole name."""
SPAN = "accel_sft: "
"""How the trainer's own parts of a step begin in a trace (tracking/time_spent.py)."""


def kind(event: Any) -> str:
    """The kind of an operator, or of an event between operators."""
    above, outer = [], event
    while outer is not None:
        above.append(outer.name)
        outer = outer.cpu_parent
    part = next((name.removeprefix(SPAN) for name in above if name.startswith(SPAN)), "")
    if part == "optimizer step":
        return "optimizer"
    if part not in ("forward", "backward"):
        return "ours"
    if any("AccumulateGrad" in name for name in above):
        return "autograd"
    named = next((kind for kind, pattern in OPERATORS if re.fullmatch(pattern, event.name)), None)
    return named or ("Python in the forward" if part == "forward" else "autograd")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the loop once in this process; return milliseconds and calls of a step by kind, and its wall times."""
    sys.path.insert(0, str(HERE / "contestants"))
    from accel_sft.launch.environment import prepare_environment

    prepare_environment()  # as the command line does before torch is imported

    import torch

    import rows
    from accel_sft.batching.layouts import Batching
    from accel_sft.commands import train

    walls: list[float] = []
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_flops=True)
    facts: dict[str, Any] = {}
    last, profiled = args.warmup_steps + args.steps, args.steps + 1  # the first one under the profiler warms it up

    def stepped(record: dict[str, float], batching: Batching) -> None:
        walls.append(time.perf_counter())
        facts["batching"] = f"{batching.layout} {batching.tokens}"
        if len(walls) == last:
            profile.start()
        if len(walls) == last + 1:  # what the profiler has so far is dropped
            profile.stop()
            profile.start()
            walls[-1] = time.perf_counter()
        if len(walls) == last + profiled:
            profile.stop()

    settings = {"max_steps": last + profiled}
    config = rows.settings(f"{args.folder}/model", shapes.SHAPES[args.shape[0]].batch, **settings)
    train.run("rows", rows.Rows(path=f"{args.folder}/{args.shape[0]}.json"), config, on_step=stepped)
    took: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0, 0])
    for event in profile.events():
        each = took[kind(event)]
        for at, value in enumerate((event.self_cpu_time_total / 1e3, 1, event.flops or 0)):
            each[at] += value / args.steps
    seconds = [one - before for before, one in itertools.pairwise(walls)]
    whole, plain = statistics.fmean(seconds[last:]) * 1e3, statistics.median(seconds[args.warmup_steps - 1 : last - 1])
    took["ours"][0] += whole - sum(each[0] for each in took.values())  # Python between the parts
    return {**facts, "kinds": took, "whole": whole, "plain": plain * 1e3}


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--steps", type=int, default=5, help="Steps timed without the profiler, and as many with it.")
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = smoke.parse(parser, shape=["series-a"], steps=1, warmup_steps=1, hidden=64, layers=2)
    if args.folder:
        Path(args.folder, "answer.json").write_text(json.dumps(measure(args)))
        return
    for shape in args.shape or ["series-b", "long-instruction"]:
        with tempfile.TemporaryDirectory() as folder:
            shapes.make_model(Path(folder, "model"), args.hidden, args.layers)
            shapes.write(Path(folder, f"{shape}.json"), shapes.SHAPES[shape])
            counts = ["--steps", str(args.steps), "--warmup-steps", str(args.warmup_steps)]
            command = [sys.executable, __file__, "--folder", folder, "--shape", shape, *counts]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(done.stdout + done.stderr)
            found = json.loads(Path(folder, "answer.json").read_text())
        whole = found["whole"]
        print(f"\n## {shape}, {found['batching']}: {found['plain']:.1f} ms a step, {whole:.1f} under the profiler\n")
        print(f"| {shape} | ms a step | share | calls | GFLOP/s |\n|---|---|---|---|---|")
        for name, (took, calls, flops) in sorted(found["kinds"].items(), key=lambda pair: -pair[1][0]):
            reached = f"{flops / took / 1e6:.0f}" if name == "matrix products" else ""
            print(f"| {name} | {took:.2f} | {took / whole:.1%} | {calls:,.0f} | {reached} |", flush=True)


if __name__ == "__main__":
    main()
