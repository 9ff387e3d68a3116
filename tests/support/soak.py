"""Kills at random instants, by hand: `python tests/support/soak.py --kills 50 --seed 0`, or `make soak`.

Each layout first runs a small job to its end, twice. Then the same job is started in fresh folders, killed several
times at random instants, resumed each time, and at its end compared with the first: the weights by SHA-256, every line
of metrics.jsonl, the curves, and result.json. Every other layout has a fixed micro-batch size, the rest the default
batching; an odd seed swaps the two.

The exit status is 0 only if every folder ended as the uninterrupted run did and nothing hung.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from launches import Launch, Machine
from stopping import steps_done
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, EVAL_EVERY = 12, 4
JOB = ("--max-steps", str(STEPS), "--global-batch-size", "10", "--seed", "7", "--max-new-tokens", "6")
JOB += ("--train-examples", "60", "--validation-examples", "7")  # two epochs
JOB += ("--save-every", "2", "--eval-every", str(EVAL_EVERY), "--resume", "auto")
DROPOUT = ("--adapter", "lora", "--lora-dropout", "0.1")
FIXED = ("--batching", "shared", "--micro-batch-size", "5")
LAYOUTS = {"plain": DROPOUT, "ddp": (), "ddp on 3": (), "z2": DROPOUT, "z3 on 3": ()}
"""Options of each layout, a launch file on two ranks or three: it trains all weights, or an adapter with dropout."""
KILLS_PER_FOLDER = 5
COMPILING_SECONDS, LAUNCH_SECONDS, END_SECONDS = 600, 120, 30
"""Seconds after which a launch counts as hung: since the start of a layout's first and of another, since its kill."""
MOST_DELAY_SECONDS = 0.3
"""What is aimed at is hit up to so many seconds after it began."""
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
ALONE = (("launcher", KILL), ("launcher", KILL), ("launcher", TERM), ("launcher", INT))
LAUNCHED = (("rank 0", KILL), ("rank 1", KILL), ("all ranks", KILL), ("launcher", KILL), ("everyone", KILL))
LAUNCHED += (("launcher", TERM), ("launcher", INT), ("everyone", INT))  # the last is Ctrl-C at a terminal


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
    """Whether a process of the launch is there after so many seconds; it is made to show its stacks."""
    until = time.monotonic() + seconds
    while (left := launch.family()) and time.monotonic() < until:
        launch.process.poll()  # reaps the launcher
        time.sleep(0.02)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGABRT)
    if left:
        time.sleep(2)
        show(launch)
    launch.process.poll()
    return bool(left)


def show(launch: Launch) -> None:
    for file in (launch.log, *sorted(launch.folder.glob("logs/*.log"))):
        print(f"--- the end of {file.name}\n{file.read_text(errors='replace')[-6000:]}")


def outcome(launch: Launch) -> dict:
    """What must be the same at the end: weights, the numbers of all steps and evaluations, curves, both statuses."""
    run_dir = launch.folder
    weights = {
        f"{name}/{file.name}": hashlib.sha256(file.read_bytes()).hexdigest()
        for name in ("final", "best")
        for file in sorted((run_dir / name).glob("*.safetensors"))
    }
    with contextlib.suppress(OSError, ValueError):
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        compared = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "accuracy")
        events = EventAccumulator(str(run_dir))
        events.Reload()
        return weights | {
            "metrics": [{key: line[key] for key in compared if key in line} for line in lines],
            "curves": {
                tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in ("train/loss", "eval/loss")
            },
            "status": json.loads((run_dir / "result.json").read_text())["status"],
            "exit status": launch.process.returncode,
            "left behind": sorted(path.name for path in run_dir.rglob(".*")),
        }
    return weights


def reference(machine: Machine, layout: str) -> dict:
    """The outcome of two uninterrupted runs, which must be the same; the first may compile an operator."""
    outcomes = []
    for number, seconds in enumerate((COMPILING_SECONDS, LAUNCH_SECONDS)):
        with started(machine, layout, f"{layout.replace(' ', '-')}-reference-{number}") as launch:
            if hangs(launch, seconds) or outcome(launch).get("status") != "complete":
                show(launch)
                sys.exit(f"{layout}: not even an uninterrupted run ends")
            outcomes.append(outcome(launch))
    if outcomes[0] != outcomes[1]:
        sys.exit(f"{layout}: two uninterrupted runs differ: {differences(*outcomes)}")
    return outcomes[0]


def differences(expected: dict, got: dict) -> list[str]:
    return [key for key in sorted(expected.keys() | got.keys()) if expected.get(key) != got.get(key)]


class Soak:
    """The kills so far, and what went wrong."""

    def __init__(self, seed: int, total: int) -> None:
        self.rng, self.total, self.kills, self.hangs, self.broken = random.Random(seed), total, 0, 0, 0

    def folder(self, machine: Machine, layout: str, name: str, expected: dict) -> None:
        """Start, kill and resume a run in one folder until its kills are spent, let it end, and compare."""
        most = min(KILLS_PER_FOLDER, self.total - self.kills)
        aims = sorted((self.rng.randrange(STEPS), self.rng.choice([*AIMS])) for _ in range(most))
        with contextlib.ExitStack() as stack:
            killed = []
            for step, aim in aims:
                killed.append(stack.enter_context(started(machine, layout, name)))
                orphaned = self.kill(killed[-1], layout, aim, step)
                # a resume may come while ranks that lost their launcher are still about to end
                if not orphaned or self.rng.random() < 0.5:
                    self.hangs += hangs(killed[-1], END_SECONDS)
            launch = stack.enter_context(started(machine, layout, name))
            self.hangs += hangs(launch, LAUNCH_SECONDS) + sum(hangs(each, END_SECONDS) for each in killed)
            wrong = differences(expected, outcome(launch))
            if wrong:
                self.broken += 1
                show(launch)
        print(f"{layout:8} {name}: {f'DIFFERENT ({wrong})' if wrong else 'identical'}", flush=True)

    def kill(self, launch: Launch, layout: str, aim: str, step: int) -> bool:
        """Kill at a random instant amid what is aimed at, unless the run ends first; returns whether ranks may have
        lost their launcher."""
        who, number = self.rng.choice(ALONE if layout == "plain" else LAUNCHED)
        until = time.monotonic() + LAUNCH_SECONDS
        while launch.process.poll() is None and time.monotonic() < until and not AIMS[aim](launch.folder, step):
            time.sleep(0.001)
        time.sleep(self.rng.random() * (MOST_DELAY_SECONDS if aim != "starting" else 10))
        if launch.process.poll() is not None:
            return False
        hit(launch, who, number)
        self.kills += 1
        done = steps_done(launch.folder)
        print(f"{self.kills:3}/{self.total}  {layout:8} {launch.folder.name}  {who} {number.name}, {aim}, step {done}")
        return number == KILL and who in ("launcher", "everyone")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names with commas between")
    parser.add_argument("--keep", action="store_true", help="leave the runs on the disk")
    arguments = parser.parse_args()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns at every resume
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    # with the fault handler, an abort shows where every thread is
    environment = {**os.environ, "ACCEL_SFT_CACHE": str(folder / "cache"), "PYTHONFAULTHANDLER": "1", "COLUMNS": "100"}
    machine = Machine(folder, devices=0, processes=2, environment=environment)
    for at, name in enumerate(LAYOUTS):
        LAYOUTS[name] += FIXED * ((at + arguments.seed) % 2)
    layouts = arguments.layouts.split(",")
    expected = {layout: reference(machine, layout) for layout in layouts}
    soak, number = Soak(arguments.seed, arguments.kills), 0
    while soak.kills < soak.total:
        layout = layouts[number % len(layouts)]
        soak.folder(machine, layout, f"run-{number}", expected[layout])
        number += 1
    print(f"{soak.kills} kills in {number} folders, of which {soak.broken} ended otherwise; {soak.hangs} hangs")
    if arguments.keep:
        print(f"the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if soak.broken or soak.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
