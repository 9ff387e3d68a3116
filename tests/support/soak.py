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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from places import launcher
from stopping import ranks, steps_done
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, EVAL_EVERY = 12, 4
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--seed", "7", "--max-new-tokens", "6")
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
    "evaluating": lambda run_dir, step: evaluated(run_dir) <= steps_done(run_dir) // EVAL_EVERY >= step // EVAL_EVERY,
    "exporting": lambda run_dir, step: any(run_dir.glob(".*.partial")),
}
"""What a run is hit amid, as its files show it, at a step or later."""


class Launch:
    """The job under a layout, launched in the background in a fresh folder or in one that an earlier launch left."""

    def __init__(self, layout: str, options: tuple[str, ...], run_dir: Path, number: int = 0) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_name(f"{run_dir.name}-{number}.log")
        yaml, _, processes = layout.partition(" on ")
        command = [sys.executable] if layout == "plain" else launcher(yaml, "--num_processes", processes or "2")
        command += ["-m", "accel_sft", *JOB, *options, "--output-dir", str(run_dir)]
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "COLUMNS": "100"}  # an abort shows all stacks
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.process.family = [psutil.Process(self.process.pid)]  # `ranks` adds to it

    def over(self) -> bool:
        return self.process.poll() is not None

    def hit(self, who: str, number: signal.Signals) -> None:
        """Send the signal to those, or to the launcher while there are no ranks yet."""
        trained = ranks(self.process)
        if who == "everyone" and number == INT:
            os.killpg(self.process.pid, number)
            return
        launcher, *_ = self.process.family
        targets = {"launcher": [launcher], "everyone": self.process.family, "all ranks": trained}
        for each in targets.get(who) or ([launcher] if len(trained) < 2 else [trained[int(who[-1])]]):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)

    def alive(self) -> list[psutil.Process]:
        """Its processes that are still running."""
        with contextlib.suppress(psutil.NoSuchProcess):
            ranks(self.process)
        self.process.poll()  # reaps the launcher
        left = []
        for each in self.process.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                    left.append(each)
        return left

    def ended(self, seconds: float) -> bool:
        """Whether all its processes end in time; the others are made to show their stacks, and are killed."""
        until = time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < until:
            time.sleep(0.02)
        for number, each in [(number, each) for number in (signal.SIGABRT, KILL) for each in left]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
            time.sleep(2 if number == signal.SIGABRT else 0)
        if left:
            print(f"HANGS: {left}")
            self.show()
        self.process.wait()
        return not left

    def show(self) -> None:
        for file in (self.log, *sorted(self.run_dir.glob("logs/*.log"))):
            print(f"--- the end of {file.name}\n{file.read_text(errors='replace')[-6000:]}")


def outcome(launch: Launch) -> dict:
    """What must be the same at the end: weights, the numbers of all steps and evaluations, curves, both statuses."""
    run_dir = launch.run_dir
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


def reference(layout: str, options: tuple[str, ...], folder: Path) -> dict:
    """The outcome of two uninterrupted runs, which must be the same; the first may compile an operator."""
    outcomes = []
    for number, seconds in enumerate((COMPILING_SECONDS, LAUNCH_SECONDS)):
        launch = Launch(layout, options, folder / f"{layout.replace(' ', '-')}-reference-{number}")
        whole = launch.ended(seconds)
        outcomes.append(outcome(launch))
        if not whole or outcomes[-1].get("status") != "complete":
            launch.show()
            sys.exit(f"{layout}: not even an uninterrupted run ends")
    if outcomes[0] != outcomes[1]:
        sys.exit(f"{layout}: two uninterrupted runs differ: {differences(*outcomes)}")
    return outcomes[0]


def differences(expected: dict, got: dict) -> list[str]:
    return [key for key in sorted(expected.keys() | got.keys()) if expected.get(key) != got.get(key)]


class Soak:
    """The kills so far, and what went wrong."""

    def __init__(self, seed: int, total: int) -> None:
        self.rng, self.total, self.kills, self.hangs, self.broken = random.Random(seed), total, 0, 0, 0

    def folder(self, layout: str, options: tuple[str, ...], run_dir: Path, expected: dict) -> None:
        """Start, kill and resume a run in one folder until its kills are spent, let it end, and compare."""
        most = min(KILLS_PER_FOLDER, self.total - self.kills)
        aims = sorted((self.rng.randrange(STEPS), self.rng.choice([*AIMS])) for _ in range(most))
        killed = []
        for number, (step, aim) in enumerate(aims):
            killed.append(Launch(layout, options, run_dir, number))
            orphaned = self.kill(killed[-1], layout, aim, step)
            # a resume may come while ranks that lost their launcher are still about to end
            if not orphaned or self.rng.random() < 0.5:
                self.hangs += not killed[-1].ended(END_SECONDS)
        launch = Launch(layout, options, run_dir, len(aims))
        self.hangs += not launch.ended(LAUNCH_SECONDS)
        self.hangs += sum(not each.ended(END_SECONDS) for each in killed)
        wrong = differences(expected, outcome(launch))
        if wrong:
            self.broken += 1
            launch.show()
        print(f"{layout:8} {run_dir.name}: {f'DIFFERENT ({wrong})' if wrong else 'identical'}", flush=True)

    def kill(self, launch: Launch, layout: str, aim: str, step: int) -> bool:
        """Kill at a random instant amid what is aimed at, unless the run ends first; returns whether ranks may have
        lost their launcher."""
        who, number = self.rng.choice(ALONE if layout == "plain" else LAUNCHED)
        until = time.monotonic() + LAUNCH_SECONDS
        while not launch.over() and time.monotonic() < until and not AIMS[aim](launch.run_dir, step):
            time.sleep(0.001)
        time.sleep(self.rng.random() * (MOST_DELAY_SECONDS if aim != "starting" else 10))
        if launch.over():
            return False
        launch.hit(who, number)
        self.kills += 1
        done = steps_done(launch.run_dir)
        print(f"{self.kills:3}/{self.total}  {layout:8} {launch.run_dir.name}  {who} {number.name}, {aim}, step {done}")
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
    os.environ["ACCEL_SFT_CACHE"] = str(folder / "cache")
    options = {name: LAYOUTS[name] + FIXED * ((at + arguments.seed) % 2) for at, name in enumerate(LAYOUTS)}
    layouts = arguments.layouts.split(",")
    expected = {layout: reference(layout, options[layout], folder) for layout in layouts}
    soak, number = Soak(arguments.seed, arguments.kills), 0
    while soak.kills < soak.total:
        layout = layouts[number % len(layouts)]
        soak.folder(layout, options[layout], folder / f"run-{number}", expected[layout])
        number += 1
    print(f"{soak.kills} kills in {number} folders, of which {soak.broken} ended otherwise; {soak.hangs} hangs")
    if arguments.keep:
        print(f"the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 1 if soak.broken or soak.hangs else 0


if __name__ == "__main__":
    sys.exit(main())
