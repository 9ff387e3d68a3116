"""The trainer's own time in a step: what is neither forward, backward nor optimizer.

    python benchmarks/overhead.py [--steps 300] [--hidden 64 --layers 2] [--functions 25] [--turns 8] [--smoke]

Runs the real loop (`train.run`, one process, float32) on a model small enough for steps of about 50 ms, where our own
time weighs most, once with a terminal (a bar) and once without (a line every ten steps). The calls of a step are timed
where the loop makes them; a part's time is its own, without the parts called within it. All that is not the model's
forward with the loss, `Stepper.backward` or `Stepper.update` is ours. Medians over the steps leave out what happens
once or twice a second (system readings, a redrawn bar), so the table has means too.

With `--turns`, the loop also runs with and without the check for weights without gradients, which looks once, after
the third step. The two take turns, so that other work on the machine affects both alike.
"""

from __future__ import annotations

import argparse
import cProfile
import dataclasses
import io
import json
import os
import pstats
import pty
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import shapes
import smoke
from clock import Clock

HERE = Path(__file__).parent
COMPUTE = ("forward", "backward", "optimizer")
EXAMPLES = 2048


def time_parts(clock: Clock) -> None:
    """Time every call that a step consists of, where the loop makes it."""
    from accel_sft.batching.layouts import Batching
    from accel_sft.data.step_plan import StepPlan
    from accel_sft.data.token_store import TokenStore
    from accel_sft.tracking import tracker
    from accel_sft.training import step as training_step
    from accel_sft.training import trainer
    from accel_sft.training.checks import Untrained

    for owner, call, part in (
        (training_step, training_step.nll_sum, "forward"),
        (training_step.Stepper, training_step.Stepper.backward, "backward"),
        (training_step.Stepper, training_step.Stepper.update, "optimizer"),
        (StepPlan, StepPlan.examples, "StepPlan.examples"),
        (StepPlan, StepPlan.epoch, "StepPlan.epoch"),
        (trainer, trainer.learning_rate, "learning rate"),
        (training_step.Stepper, training_step.Stepper.set_learning_rate, "learning rate"),
        (TokenStore, TokenStore.take, "TokenStore.take"),
        (Batching, Batching.divide, "Batching.divide"),
        (Batching, Batching.batch, "Batching.batch"),
        (trainer, trainer.reduce_step, "gather"),
        (Untrained, Untrained.look, "weights without gradients"),
        (tracker.Tracker, tracker.Tracker.system, "system readings"),
        (tracker.Tracker, tracker.Tracker.step, "Tracker.step"),
        (tracker.MetricsFile, tracker.MetricsFile.append, "metrics.jsonl"),
        (tracker.Trackers, tracker.Trackers.curves, "TensorBoard"),
        (tracker.ProgressBar, tracker.ProgressBar.step, "console"),
    ):
        clock.time(owner, call, part)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run the loop once in this process; return the seconds of every part of every step. `on_step` ends a step.

    Raises:
        LookupError: a part's function no longer exists, or the loop no longer calls it.
    """
    sys.path.insert(0, str(HERE / "contestants"))
    from accel_sft.launch.environment import prepare_environment

    prepare_environment()  # as the command line does before torch is imported

    import psutil

    import rows
    from accel_sft.batching.layouts import Batching
    from accel_sft.commands import train
    from accel_sft.training.checks import Untrained

    laps: list[dict[str, float]] = []
    profile = cProfile.Profile() if args.functions else None

    def watched(part: str, begins: bool) -> None:
        if profile and part in COMPUTE and args.warmup_steps <= len(laps) < steps:
            (profile.disable if begins else profile.enable)()

    clock, steps = Clock(watched), args.warmup_steps + args.steps
    if args.unchecked:
        Untrained.look = lambda self, grad_norm, *, last: None  # type: ignore[method-assign]
    time_parts(clock)
    facts: dict[str, Any] = {}
    writers: set[int | None] = set()

    def stepped(record: dict[str, float], batching: Batching) -> None:
        laps.append(clock.lap("the step's end"))
        if len(laps) == 1:
            writers.update(each.native_id for each in threading.enumerate() if each is not threading.main_thread())
        if profile and len(laps) == args.warmup_steps:
            profile.enable()
        if len(laps) == steps:
            if profile:
                profile.disable()
            threads = psutil.Process().threads()
            facts["writer"] = sum(each.user_time + each.system_time for each in threads if each.id in writers)
            facts["batching"] = f"{batching.layout} {batching.tokens}"

    settings = {"max_steps": steps, "log_every": 10, "batching": "shared"}
    config = rows.settings(f"{args.folder}/model", shapes.SHAPES[args.shape].batch, **settings)
    train.run("rows", rows.Rows(path=f"{args.folder}/{args.shape}.json"), config, on_step=stepped)
    if clock.uncalled:
        raise LookupError(f"not called in {len(laps)} steps: {', '.join(sorted(clock.uncalled))}; what replaces them?")
    if profile:
        text = io.StringIO()
        pstats.Stats(profile, stream=text).strip_dirs().sort_stats("tottime").print_stats(args.functions)
        facts["functions"] = text.getvalue()
    return {**facts, "steps": laps[args.warmup_steps :]}


def in_own_process(args: argparse.Namespace, folder: Path, bar: bool) -> dict[str, Any]:
    """Run `measure` in a process whose standard output is a terminal (`bar`) or a pipe."""
    answer = folder / "answer.json"
    flags = {
        "steps": args.steps,
        "warmup-steps": args.warmup_steps,
        "shape": args.shape,
        "functions": args.functions,
        "unchecked": args.unchecked,
        "folder": folder,
        "answer": answer,
    }
    command = [sys.executable, __file__, *(word for k, v in flags.items() for word in (f"--{k}", str(v)))]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "TMPDIR": str(folder)}
    reading, writing = pty.openpty() if bar else os.pipe()
    with subprocess.Popen(command, stdout=writing, env=environment) as process:
        os.close(writing)
        shown = []
        while True:  # until the other end is closed: a terminal reports this as EIO
            try:
                part = os.read(reading, 65536)
            except OSError:
                break
            if not part:
                break
            shown.append(part)
    os.close(reading)
    if process.returncode:
        raise SystemExit(b"".join(shown).decode(errors="replace"))
    return json.loads(answer.read_text())


def table(runs: dict[str, dict[str, Any]]) -> str:
    """A Markdown table of every part's median and mean milliseconds per step, and its share of a step."""
    parts = sorted({part for run in runs.values() for step in run["steps"] for part in step} - set(COMPUTE))

    def times(run: dict[str, Any], *wanted: str) -> tuple[float, float]:
        each = [1e3 * sum(step.get(part, 0.0) for part in wanted) for step in run["steps"]]
        return statistics.median(each), statistics.fmean(each)

    wholes = {label: times(run, *COMPUTE, *parts) for label, run in runs.items()}
    lines = [
        "| ms a step | " + " | ".join(f"{label}: median | mean | share of the mean" for label in runs) + " |",
        "|---|" + "---|---|---|" * len(runs),
    ]
    first = next(iter(runs.values()))
    parts.sort(key=lambda part: -times(first, part)[1])
    rows = [("a step", (*COMPUTE, *parts)), *((part, (part,)) for part in COMPUTE), ("**ours**", tuple(parts))]
    for name, wanted in [*rows, *((f"- {part}", (part,)) for part in parts)]:
        cells = []
        for label, run in runs.items():
            median, mean = times(run, *wanted)
            cells.append(f"{median:.3f} | {mean:.3f} | {mean / wholes[label][1]:.2%}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def in_turns(args: argparse.Namespace, folder: Path) -> str:
    """A Markdown table of the milliseconds of a step with and without the check for weights without gradients."""
    found: tuple[list[Any], list[Any]] = [], []
    args.warmup_steps, args.functions = 0, 0
    for turn in range(args.turns):
        for args.unchecked in (turn % 2, 1 - turn % 2):
            found[args.unchecked].append(in_own_process(args, folder, bar=False)["steps"])
    lines = ["| ms a step, median | with the check | without |", "|---|---|---|"]
    parts = {"steps 1 and 2": slice(2), "step 3, after which it looks": slice(2, 3), "later": slice(3, None)}
    for name, those in parts.items():
        for what, part in ((name, None), ("- the check", "weights without gradients")):
            steps = [[step for run in runs for step in run[those]] for runs in found]
            taken = [[step[part] if part else sum(step.values()) for step in each] for each in steps]
            lines.append(f"| {what} | {' | '.join(f'{1e3 * statistics.median(each):.3f}' for each in taken)} |")
    return "\n".join(lines)


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--steps", type=int, default=300, help="Counted steps, after the warm-up.")
    parser.add_argument("--warmup-steps", type=int, default=20)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="series-a")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument(
        "--functions", type=int, default=0, help="Also run cProfile on our own part, and show so many functions."
    )
    parser.add_argument(
        "--turns", type=int, default=0, help="Runs with and without the check for weights without gradients."
    )
    parser.add_argument("--unchecked", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--answer", help=argparse.SUPPRESS)
    args = smoke.parse(parser, steps=2, warmup_steps=2)
    if args.answer:
        Path(args.answer).write_text(json.dumps(measure(args)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = shapes.make_model(folder / "model", args.hidden, args.layers)
        shape = dataclasses.replace(shapes.SHAPES[args.shape], batch=EXAMPLES)
        shapes.write(folder / f"{args.shape}.json", shape)
        runs = {}
        for label, bar in (("bar", True), ("lines", False)):
            runs[label] = run = in_own_process(args, folder, bar)
            print(
                f"{label}: {parameters:,} parameters, {shapes.SHAPES[args.shape].batch} rows of {args.shape} a "
                f"step, {run['batching']}; beside the loop, other threads took "
                f"{1e3 * run['writer'] / len(run['steps']):.2f} ms of CPU a step",
                flush=True,
            )
        print("\n" + table(runs))
        for label, run in runs.items():
            if args.functions:
                print(f"\n{label}:\n{run['functions']}")
        if args.turns:
            print(f"\n{in_turns(args, folder)}")


if __name__ == "__main__":
    main()
