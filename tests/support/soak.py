"""Kills at random instants, by hand: `python tests/support/soak.py --kills 50 --seed 0`, or `make soak`.

Each layout first runs a small job to its end, twice. Then the same job is started in fresh folders, killed several
times at random instants, resumed each time, and at its end compared with the first: the weights by SHA-256, every line
of metrics.jsonl, and result.json. The exit status is 0 only if every folder ended as the uninterrupted run did and
nothing hung.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from launches import Launch, Machine
from stopping import steps_done

STEPS, EVAL_EVERY = 12, 4
JOB = ("--max-steps", str(STEPS), "--global-batch-size", "10", "--seed", "7", "--max-new-tokens", "6")
JOB += ("--train-examples", "60", "--validation-examples", "7")  # two epochs
JOB += ("--save-every", "2", "--eval-every", str(EVAL_EVERY), "--resume", "auto")
DROPOUT = ("--adapter", "lora", "--lora-dropout", "0.1")
FIXED = ("--batching", "shared", "--micro-batch-size", "5")
LAYOUTS = {"plain": (*DROPOUT, *FIXED), "ddp": (), "ddp on 3": FIXED, "z2": DROPOUT, "z3 on 3": FIXED}
"""Options of each layout, a launch file on two ranks or three: it trains all weights, or an adapter with dropout."""
KILLS_PER_FOLDER = 5
COMPILING_SECONDS, LAUNCH_SECONDS, END_SECONDS = 600, 120, 30
"""Seconds after which a launch counts as hung: since the start of a layout's first and of another, since its kill."""
MOST_DELAY_SECONDS = 0.3
"""What is aimed at is hit up to so many seconds after it began."""
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
HITS = (("rank 0", KILL), ("rank 1", KILL), ("all ranks", KILL), ("launcher", KILL), ("everyone", KILL))
HITS += (("launcher", TERM), ("launcher", INT), ("everyone", INT))  # the last is Ctrl-C at a terminal


def evaluated(run_dir: Path) -> int:
    file = run_dir / "metrics.jsonl"
    return file.read_text().count('"eval_loss"') if file.exists() else 0


AIMS: dict[str, Callable[[Path, int], bool]] = {
    "starting": lambda run_dir, step: True,
    "stepping": lambda run_dir, step: steps_done(run_dir) >= step,
    "saving": lambda run_dir, step: steps_done(run_dir) >= step and any(run_dir.glob("checkpoints/.*.partial")),
    "evaluating": lambda run_dir, step: (
        steps_done(run_dir) >= step and 0 < evaluated(run_dir) <= steps_done(run_dir) // EVAL_EVERY
    ),
    "exporting": lambda run_dir, step: any(run_dir.glob(".*.partial")),
}
"""What a run is hit amid, as its files show it, at a step or later."""


def started(machine: Machine, layout: str, name: str) -> contextlib.AbstractContextManager[Launch]:
    """The job under a layout, in a fresh folder or in one that an earlier launch left."""
    yaml, _, processes = layout.partition(" on ")
    yaml = "" if layout == "plain" else yaml
    return machine.started(name, yaml, *JOB, *LAYOUTS[layout], processes=int(processes or 2))


def hit(launch: Launch, who: str, number: signal.Signals) -> None:
    """Send the signal to those, or to the launcher while there are no ranks yet."""
    if (who, number) == ("everyone", INT):
        os.killpg(launch.process.pid, number)
        return
    everyone = launch.family()
    ranks = [process for process in everyone if process.pid != launch.process.pid]
    targets = {"everyone": everyone, "all ranks": ranks}.get(who) or [psutil.Process(launch.process.pid)]
    if who.startswith("rank"):
        with contextlib.suppress(AssertionError):
            targets = [launch.rank(int(who[-1]))]
    for process in targets:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def hangs(launch: Launch, seconds: float) -> bool:
    """Whether a process of the launch is there after so many seconds; its stacks are then in what it printed."""
    until = time.monotonic() + seconds
    while (left := launch.family()) and time.monotonic() < until:
        launch.process.poll()  # reaps the launcher
        time.sleep(0.02)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    launch.process.wait()  # a process that is about to end has lost its mark before it has a status
    return bool(left)


def outcome(launch: Launch, seconds: float) -> dict:
    """What must be the same once the launch has ended: weights, the numbers of all steps and evaluations, and both
    statuses. Of one that hangs, or has no such files, the end of its log is shown."""
    run_dir = launch.folder
    compared = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "accuracy")
    made = {"hangs": hangs(launch, seconds), "exit status": launch.process.returncode}
    for file in sorted(path for name in ("final", "best") for path in (run_dir / name).glob("*.safetensors")):
        made[str(file.relative_to(run_dir))] = hashlib.sha256(file.read_bytes()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        made["metrics"] = [{key: line[key] for key in compared if key in line} for line in lines]
        made["status"] = json.loads((run_dir / "result.json").read_text())["status"]
        made["left behind"] = sorted(path.name for path in run_dir.rglob(".*"))
    if made["hangs"] or made.get("status") != "complete":
        print(launch.log.read_text(errors="replace")[-6000:])
    return made


def reference(machine: Machine, layout: str) -> dict:
    """The outcome of two uninterrupted runs, which must be the same; the first may compile an operator."""
    outcomes = []
    for number, seconds in enumerate((COMPILING_SECONDS, LAUNCH_SECONDS)):
        with started(machine, layout, f"{layout}-reference-{number}") as launch:
            outcomes.append(outcome(launch, seconds))
    if outcomes[0] != outcomes[1] or outcomes[0].get("status") != "complete":
        sys.exit(f"{layout}: not even uninterrupted runs end alike")
    return outcomes[0]


def kill(launch: Launch, rng: random.Random, aim: str, step: int) -> str:
    """Kill at a random instant amid what is aimed at; return who was hit, "" if the run ended first."""
    who, number = rng.choice(HITS)
    until = time.monotonic() + LAUNCH_SECONDS
    while launch.process.poll() is None and time.monotonic() < until and not AIMS[aim](launch.folder, step):
        time.sleep(0.001)
    time.sleep(rng.random() * (MOST_DELAY_SECONDS if aim != "starting" else 10))
    if launch.process.poll() is not None:
        return ""
    hit(launch, who, number)
    print(f"  {who} {number.name}, {aim}, step {steps_done(launch.folder)}", flush=True)
    return f"{who} {number.name}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names with commas between")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    # with the fault handler, an abort shows where every thread is
    environment = {**os.environ, "ACCEL_SFT_CACHE": str(folder / "cache"), "PYTHONFAULTHANDLER": "1", "COLUMNS": "100"}
    machine = Machine(folder, devices=0, processes=2, environment=environment)
    layouts = arguments.layouts.split(",")
    expected = {layout: reference(machine, layout) for layout in layouts}
    rng, kills, wrong = random.Random(arguments.seed), 0, 0
    for number, layout in enumerate(itertools.cycle(layouts)):
        if kills >= arguments.kills:
            break
        with contextlib.ExitStack() as stack:
            for step, aim in sorted((rng.randrange(STEPS), rng.choice([*AIMS])) for _ in range(KILLS_PER_FOLDER)):
                launch = stack.enter_context(started(machine, layout, f"run-{number}"))
                who = kill(launch, rng, aim, step)
                kills += bool(who)
                # a resume may come while ranks that lost their launcher are still about to end
                orphaned = who in ("launcher SIGKILL", "everyone SIGKILL")
                wrong += not (orphaned and rng.random() < 0.5) and hangs(launch, END_SECONDS)
            last = outcome(stack.enter_context(started(machine, layout, f"run-{number}")), LAUNCH_SECONDS)
        differing = [key for key in last.keys() | expected[layout] if last.get(key) != expected[layout].get(key)]
        wrong += bool(differing)
        said = f"DIFFERENT {[(key, last.get(key)) for key in sorted(differing)]}" if differing else "identical"
        print(f"{layout:8} run-{number}: {said}", flush=True)
    print(f"{kills} kills; {wrong} runs hung or ended otherwise; the runs are in {folder}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
