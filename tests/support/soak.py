"""Kills at random instants, by hand: `python tests/support/soak.py --kills 50 --seed 0`, or `make soak`.

Each layout first runs a small job to its end. Then the same job is started in fresh folders, killed several times at
random instants, resumed each time, and at its end compared with the first: the weights by SHA-256, every line of
metrics.jsonl, and result.json. Every other layout has a fixed micro-batch size, the rest the default batching; an odd
seed swaps the two. A phase is drawn first and then an instant in it, since most phases are short; which phase a kill
hit is read from the files that the run has written by then.

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
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from places import CONFIGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STEPS, SAVE_EVERY, EVAL_EVERY = 12, 2, 4
JOB = ("math", "--max-steps", str(STEPS), "--global-batch-size", "10", "--seed", "7", "--max-new-tokens", "6")
JOB += ("--train-examples", "60", "--validation-examples", "7")  # two epochs
JOB += ("--save-every", str(SAVE_EVERY), "--eval-every", str(EVAL_EVERY))
DROPOUT = ("--adapter", "lora", "--lora-dropout", "0.1")
FIXED = ("--batching", "shared", "--micro-batch-size", "5")
LAYOUTS = {"plain": DROPOUT, "ddp": (), "ddp on 3": (), "z2": DROPOUT, "z3 on 3": ()}
"""Options of each layout, a launch file on two ranks or three: it trains all weights, or an adapter with dropout;
`alternate` adds a fixed batching."""
KILLS_PER_FOLDER = 5
LAUNCH_SECONDS, END_SECONDS = 120, 30
"""Seconds after which a launch counts as hung: since its start, and since it was killed."""

PHASES = {"starting": 2, "stepping": 4, "saving": 3, "evaluating": 3, "exporting": 3}
"""Relative frequency with which kills are aimed at each phase."""
STEPS_OF = {
    "starting": range(STEPS),
    "stepping": range(STEPS),
    "saving": range(SAVE_EVERY, STEPS + 1, SAVE_EVERY),
    "evaluating": range(0, STEPS + 1, EVAL_EVERY),
    "exporting": (EVAL_EVERY, STEPS),  # best/ after the first evaluation of a trained model, final/ at the end
}
KILL, TERM, INT = signal.SIGKILL, signal.SIGTERM, signal.SIGINT
ALONE = (("run", KILL), ("run", KILL), ("run", TERM), ("run", INT))
LAUNCHED = (("rank 0", KILL), ("rank 1", KILL), ("all ranks", KILL), ("launcher", KILL), ("everyone", KILL))
LAUNCHED += (("launcher", TERM), ("launcher", INT), ("everyone", INT))  # the last is Ctrl-C at a terminal


def alternate(seed: int) -> None:
    """Give every other layout a fixed batching; the rest keep the default."""
    for number, name in enumerate(LAYOUTS):
        LAYOUTS[name] += FIXED if (number + seed) % 2 else ()


class Launch:
    """The job under a layout, launched in the background in a fresh folder or in one that an earlier launch left."""

    def __init__(self, layout: str, run_dir: Path, number: int) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_name(f"{run_dir.name}-{number}.log")
        command = [sys.executable, "-m", "accel_sft"]
        if layout != "plain":
            command = [str(Path(sysconfig.get_path("scripts"), "accelerate")), "launch"]
            yaml, _, ranks = layout.partition(" on ")
            command += ["--config_file", str(CONFIGS / f"{yaml}.yaml"), "--num_processes", ranks or "2"]
            command += ["--main_process_port", "0", "-m", "accel_sft"]
        self.goes_on = any(run_dir.glob("checkpoints/step-*"))
        command += [*JOB, *LAYOUTS[layout], "--output-dir", str(run_dir), "--resume", "auto"]
        # with the fault handler, an abort shows where every thread is
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1", "COLUMNS": "100"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        self.started = time.monotonic()
        self.family = [psutil.Process(self.process.pid)]
        self._begun = False

    def ranks(self) -> list[psutil.Process]:
        """The processes that train, in order; the process itself without a launcher."""
        found = {}
        with contextlib.suppress(psutil.Error):
            for child in self.family[0].children():
                with contextlib.suppress(psutil.Error, KeyError):
                    found[int(child.environ()["RANK"])] = child
        self.family += [child for child in found.values() if child not in self.family]
        return [found[rank] for rank in sorted(found)]

    def alive(self) -> list[psutil.Process]:
        """Its processes that are still running."""
        self.process.poll()
        left = []
        for each in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                if each.is_running() and each.status() != psutil.STATUS_ZOMBIE:
                    left.append(each)
        return left

    def begun(self) -> bool:
        """Whether it is past its start; until then, the folder shows what an earlier launch did."""
        if not self._begun:
            said = self.log.read_text(errors="replace")
            began = "batching " in said and (not self.goes_on or "resumed " in said)
            self._begun = began or "is finished" in said
        return self._begun

    def where(self) -> tuple[str, int]:
        """The (phase, step) that the run's files show."""
        if not self.begun():
            return "starting", self.done()[0]
        step, judged = self.done()
        with contextlib.suppress(FileNotFoundError):
            if '"status": "complete"' in (self.run_dir / "result.json").read_text():
                return "ended", step  # only its exit is left
        for folder, phase in ((self.run_dir / "checkpoints", "saving"), (self.run_dir, "exporting")):
            if folder.is_dir() and any(re.search(r"\.(partial|outgoing)$", name) for name in os.listdir(folder)):
                return phase, step
        if step % EVAL_EVERY == 0 and judged < step:
            return "evaluating", step
        if step == STEPS and (self.run_dir / "checkpoints" / f"step-{STEPS:06d}").is_dir():
            return "exporting", step  # before and after the files, up to result.json
        return "stepping", step

    def done(self) -> tuple[int, int]:
        """The last step in metrics.jsonl, and the last one that was evaluated (-1: none)."""
        steps, judged = [0], [-1]
        with contextlib.suppress(FileNotFoundError):
            for line in (self.run_dir / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):  # the line is being written
                    record = json.loads(line)
                    (judged if "eval_loss" in record else steps).append(record["step"])
        return max(steps), max(judged)

    def late(self) -> bool:
        return time.monotonic() - self.started > LAUNCH_SECONDS

    def hit(self, who: str, number: signal.Signals) -> str:
        """Send the signal; returns who got it."""
        ranks = self.ranks()
        if who.startswith(("rank", "all")) and len(ranks) < 2:
            who = "launcher"  # there are no ranks yet
        if who == "everyone" and number == INT:
            os.killpg(self.process.pid, number)
            return who
        targets = {"run": self.family[:1], "launcher": self.family[:1], "everyone": self.family, "all ranks": ranks}
        for each in targets[who] if who in targets else [ranks[int(who[-1])]]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(number)
        return who

    def ended(self, seconds: float) -> bool:
        """Whether all its processes end in time; the others are made to show their stacks, and are killed."""
        until = time.monotonic() + seconds
        while self.alive() and time.monotonic() < until:
            self.ranks()
            time.sleep(0.02)
        left = self.alive()
        for each in left[1:] or left:  # the launcher's stack would only show torchrun waiting
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGABRT)
        if left:
            time.sleep(2)
            print(f"HANGS: {[(each.pid, each.status()) for each in self.alive()] or 'until it was aborted'}")
            self.show()
        for each in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.wait()
        return not left

    def show(self) -> None:
        for file in (self.log, *sorted(self.run_dir.glob("logs/*.log"))):
            print(f"--- the end of {file.name}\n{file.read_text(errors='replace')[-6000:]}")


def outcome(run_dir: Path) -> dict:
    """What must be the same at the end: weights, the numbers of all steps and evaluations, curves, status."""
    weights = {}
    for name in ("final", "best"):
        for file in sorted((run_dir / name).glob("*.safetensors")):
            weights[f"{name}/{file.name}"] = hashlib.sha256(file.read_bytes()).hexdigest()
    with contextlib.suppress(OSError, ValueError):
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        kept = ("step", "epoch", "loss", "grad_norm", "learning_rate", "eval_loss", "accuracy")
        events = EventAccumulator(str(run_dir))
        events.Reload()
        drawn = [tag for tag in events.Tags()["scalars"] if tag in ("train/loss", "eval/loss")]
        return {
            **weights,
            "metrics": [{key: line[key] for key in kept if key in line} for line in lines],
            "curves": {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in drawn},
            "status": json.loads((run_dir / "result.json").read_text())["status"],
            "left behind": sorted(path.name for path in run_dir.rglob(".*")),
        }
    return weights


@dataclass
class Reference:
    """An uninterrupted run: its outcome, and the median seconds of its phases."""

    outcome: dict
    seconds: dict[str, float]


def reference(layout: str, folder: Path) -> Reference:
    """Make two uninterrupted runs, which must end alike; the first may compile an operator and fill the cache."""
    outcomes, seconds = [], {}
    for number in range(2):
        launch = Launch(layout, folder / f"{layout.replace(' ', '-')}-reference-{number}", 0)
        launch.started += 480 * (number == 0)  # time for the compiler
        lengths: dict[str, list[float]] = {}
        before = None
        while launch.process.poll() is None and not launch.late():
            now, at = time.monotonic(), launch.where()
            if at != before:
                before, since = at, now
                lengths.setdefault(at[0], []).append(0.0)
            lengths[at[0]][-1] = now - since
            time.sleep(0.001)
        ended = launch.ended(END_SECONDS)
        outcomes.append(outcome(launch.run_dir))
        if not ended or launch.process.returncode or outcomes[-1].get("status") != "complete":
            launch.show()
            sys.exit(f"{layout}: not even an uninterrupted run ends")
        seconds = {phase: statistics.median(each) for phase, each in lengths.items()}
    if outcomes[0] != outcomes[1]:
        sys.exit(f"{layout}: two uninterrupted runs differ: {differences(*outcomes)}")
    weights = next(digest for name, digest in outcomes[0].items() if name.startswith("final/"))
    told = ", ".join(f"{phase} {length:.3f} s" for phase, length in seconds.items())
    how = "fixed" if set(FIXED) <= set(LAYOUTS[layout]) else "default"
    print(f"{layout}: uninterrupted, {how} batching, final weights {weights[:16]}; {told}", flush=True)
    return Reference(outcomes[0], seconds)


def differences(expected: dict, got: dict) -> list[str]:
    return [key for key in sorted(expected.keys() | got.keys()) if expected.get(key) != got.get(key)]


@dataclass
class Kill:
    """One signal: where it hit, and whether the run ended as the uninterrupted one."""

    layout: str
    phase: str
    launcher_gone: bool
    identical: bool = False


@dataclass
class Soak:
    """The kills so far."""

    rng: random.Random
    total: int
    kills: list[Kill] = field(default_factory=list)
    hangs: int = 0
    broken_folders: int = 0

    def folder(self, layout: str, run_dir: Path, expected: Reference) -> None:
        """Start, kill and resume a run in one folder until its kills are spent, let it end, and compare."""
        before = len(self.kills)
        aims = self.rng.choices(list(PHASES), PHASES.values(), k=min(KILLS_PER_FOLDER, self.total - before))
        plan = sorted((self.rng.choice(STEPS_OF[phase]), phase) for phase in aims)
        leftover: Launch | None = None
        number = 0
        while True:
            launch = Launch(layout, run_dir, number)
            number += 1
            kill = self.kill(launch, layout, expected, *plan.pop(0)) if plan else None
            seconds = END_SECONDS if kill else max(1.0, launch.started + LAUNCH_SECONDS - time.monotonic())
            # a resume may come while ranks that lost their launcher are still about to end
            if not (kill and kill.launcher_gone and self.rng.random() < 0.5):
                self.hangs += not launch.ended(seconds)
            if leftover:
                self.hangs += not leftover.ended(END_SECONDS)
            leftover = launch
            if kill is None:
                break
        wrong = differences(expected.outcome, outcome(run_dir))
        wrong += [f"exit status {launch.process.returncode}"] if launch.process.returncode else []
        if wrong:
            self.broken_folders += 1
            launch.show()
        for kill in self.kills[before:]:
            kill.identical = not wrong
        word = f"DIFFERENT ({', '.join(wrong)})" if wrong else "identical"
        print(
            f"{layout:8} {run_dir.name}: {word} after {len(self.kills) - before} kills and {number} launches",
            flush=True,
        )

    def kill(self, launch: Launch, layout: str, expected: Reference, step: int, phase: str) -> Kill | None:
        """Wait for the phase at this step or later, and kill at a random instant in it; None if the run ends first, or
        hangs."""
        who, number = self.rng.choice(ALONE if layout == "plain" else LAUNCHED)
        delay = self.rng.random() * expected.seconds.get(phase, 0.05)
        while launch.process.poll() is None and not launch.late():
            now, at = launch.where()
            if now == phase and (at >= step or phase == "starting"):
                break
            time.sleep(0.001)
        time.sleep(delay)
        launch.ranks()
        now, at = launch.where()
        if launch.process.poll() is not None or launch.late() or now == "ended":
            return None
        who = launch.hit(who, number)
        kill = Kill(layout, now, number == KILL and who in ("run", "launcher", "everyone"))
        self.kills.append(kill)
        line = f"{len(self.kills):3}/{self.total}  {launch.run_dir.name}  {who} {number.name}"
        print(f"{layout:8} {line:44}  {now:10}  step {at:2}", flush=True)
        return kill


def table(kills: list[Kill]) -> str:
    lines = [f"{'':12}{'kills':>7}{'identical':>11}"]
    for name in ("all", *dict.fromkeys(name for kill in kills for name in (kill.phase, kill.layout))):
        group = [kill for kill in kills if name in ("all", kill.phase, kill.layout)]
        lines.append(f"{name:12}{len(group):7}{sum(kill.identical for kill in group):11}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", default=",".join(LAYOUTS), help="names with commas between")
    parser.add_argument("--keep", action="store_true", help="leave the runs on the disk")
    arguments = parser.parse_args()
    started = time.monotonic()
    logging.getLogger("tensorboard").setLevel(logging.ERROR)  # it warns at every resume
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    os.environ["ACCEL_SFT_CACHE"] = str(folder / "cache")
    layouts = arguments.layouts.split(",")
    alternate(arguments.seed)
    expected = {layout: reference(layout, folder) for layout in layouts}
    soak = Soak(random.Random(arguments.seed), arguments.kills)
    number = 0
    while len(soak.kills) < soak.total:
        layout = layouts[number % len(layouts)]
        soak.folder(layout, folder / f"run-{number}", expected[layout])
        number += 1
    print(f"\n{table(soak.kills)}\n")
    good = sum(kill.identical for kill in soak.kills)
    print(f"{good} of {soak.total} kills resumed and identical, {soak.hangs} hangs", end=", ")
    print(f"{number} folders, {time.monotonic() - started:.0f} s, seed {arguments.seed}")
    if arguments.keep:
        print(f"the runs are in {folder}")
    else:
        shutil.rmtree(folder)
    return 0 if good == soak.total and not soak.hangs and not soak.broken_folders else 1


if __name__ == "__main__":
    sys.exit(main())
