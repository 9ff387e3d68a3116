"""Launches of the trainer for the checks of tests/gpu: their commands, signals to their ranks, and what they left.

Every process that a launch starts inherits a mark in its environment. By it they are found wherever they have gone (the
launcher puts each rank into a session of its own), and none of them outlives its check.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "accelerate_configs"
LAUNCHER = (sys.executable, "-m", "accelerate.commands.launch")
MARK = "ACCEL_SFT_GPU_CHECK"
LEAVING_SECONDS = 40
"""Seconds after its launcher's end in which the last process of a launch must be gone: torchrun waits 30 for a rank."""


class Failed(Exception):
    """A check does not hold; the message says what was seen."""


class NotTried(Exception):
    """A check, or one launch of it, cannot be tried on this machine; the message says why."""


@dataclass
class Run:
    """A launch that has ended: its folder, exit status, what it printed, and how many of its processes were left."""

    folder: Path
    status: int
    output: str
    left: int = 0

    def expect(self, status: int = 0) -> Run:
        if self.left:
            raise Failed(f"{self.folder.name}: {self.left} processes were there {LEAVING_SECONDS} s after its launcher")
        if self.status != status:
            errors = [line for line in self.output.splitlines() if "rror" in line] or self.output.splitlines()[-3:]
            raise Failed(f"{self.folder.name} ended with {self.status}: {' / '.join(errors[:3])[:400]}")
        return self

    def says(self, pattern: str) -> str:
        """The first match of a pattern in what was printed, line breaks taken as blanks; Failed without one."""
        printed = " ".join(self.output.split())
        if not (found := re.search(pattern, printed)):
            errors = [line for line in self.output.splitlines() if "Error: " in line]
            raise Failed(
                f"{self.folder.name} does not say {pattern!r}, but: {' / '.join(errors[:2] or [printed[-300:]])}"
            )
        return found[0]

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that are of training."""
        file = self.folder / "metrics.jsonl"
        written = file.read_text().splitlines() if file.exists() else []
        return [line for line in map(json.loads, written) if "loss" in line]

    @property
    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())

    @property
    def weights(self) -> str:
        """A hash of the final weights."""
        files = sorted((self.folder / "final").glob("*.safetensors"))
        if not files:
            raise Failed(f"{self.folder.name} has no weights in final/")
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def difference(run: Run, other: Run) -> float:
    """The largest relative difference of two runs' losses, step by step."""
    if len(run.losses) != len(other.losses) or not run.losses:
        raise Failed(f"{run.folder.name} has {len(run.losses)} steps, {other.folder.name} {len(other.losses)}")
    return max(abs(a - b) / abs(b) for a, b in zip(run.losses, other.losses, strict=True))


@dataclass
class Launch:
    """A launch that is running: its folder, its launcher, the file with what it prints, and its processes' mark."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    def family(self) -> list[psutil.Process]:
        """All of its processes that are alive, the launcher included."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    found.append(process)
        return found

    def rank(self, number: int) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK", "0") == str(number):  # one process alone has none
                    return process
        raise Failed(f"{self.folder.name} has no rank {number}")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Wait for a condition; Failed if the launch ends before it holds, or it takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None or time.monotonic() > end:
                raise Failed(f"{self.folder.name}: {what} did not come: {self.log.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        file = self.folder / "metrics.jsonl"
        self.until(lambda: file.exists() and file.read_text().count('"loss"') >= step, f"step {step}")

    def ended(self, seconds: float) -> Run:
        """Wait for the end of the launcher and of all that it started; Failed if the launcher takes longer."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.folder.name} was not over in {seconds:.0f} s: {self._said()[-300:]}") from None
        end = time.monotonic() + LEAVING_SECONDS
        while (left := self.family()) and time.monotonic() < end:
            time.sleep(0.2)
        return Run(self.folder, status, self._said(), len(left))

    def _said(self) -> str:
        return self.log.read_text(errors="replace")


@dataclass
class Machine:
    """Where checks run: a folder for their runs and models, the environment of their processes, how many processes a
    launch has, and the runs that several checks compare with."""

    folder: Path
    tiny: bool = False
    processes: int = 1
    devices: int = 0
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTHONUNBUFFERED": "1"})
    kept: dict[str, Any] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    """Names of the runs that the present check has started."""

    def __post_init__(self) -> None:
        self.environment["ACCEL_SFT_CACHE"] = str(self.folder / "cache")
        if self.tiny:  # where fsdp2_on_cpu is
            paths = (str(ROOT / "tests" / "support"), self.environment.get("PYTHONPATH", ""))
            self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))

    @property
    def last(self) -> int:
        """The rank that the checks of faults harm."""
        return self.processes - 1

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for by this name."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def job(self, steps: int, *more: str) -> tuple[str, ...]:
        """Options of a job of `math` without evaluations."""
        rows = ("--train-examples", "200" if self.tiny else "2000", "--validation-examples", "8")
        return ("--max-steps", str(steps), "--eval-every", "off", *rows, *more)

    def short(self, *more: str) -> tuple[str, ...]:
        """Options of the job whose curves are compared; with --tiny it is shorter."""
        return self.job(6 if self.tiny else 20, *more)

    def endless(self, *more: str) -> tuple[str, ...]:
        """Options of a job that will not end by itself while it is watched."""
        return self.job(100_000, "--save-every", "off", *more)

    def command(
        self, name: str, yaml: str, options: tuple[str, ...], launcher: tuple[str, ...], processes: int, task: str
    ) -> tuple[str, ...]:
        """The arguments of `accelerate launch` for a run in the folder `name`."""
        fsdp = yaml.startswith(("fsdp", "hsdp"))
        launch = ("--config_file", str(CONFIGS / f"{yaml}.yaml"), "--num_processes", str(processes))
        module = "fsdp2_on_cpu" if fsdp and not self.devices else "accel_sft"
        launch += ("--main_process_port", "0", *launcher, "-m", module)
        return (*launch, task, "--output-dir", str(self.folder / name), *options)

    @contextlib.contextmanager
    def started(
        self,
        name: str,
        yaml: str,
        *options: str,
        launcher: tuple[str, ...] = (),
        processes: int = 0,
        task: str = "math",
        environment: dict[str, str] | None = None,
    ) -> Iterator[Launch]:
        """Run a launch in the background; whatever of it is left in the end is killed."""
        command = self.command(name, yaml, options, launcher, processes or self.processes, task)
        log, mark = self.folder / f"{name}.log", uuid.uuid4().hex
        self.made.append(name)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [*LAUNCHER, *command],
                stdout=file,
                stderr=file,
                env={**self.environment, **(environment or {}), MARK: mark},
                cwd=self.folder,
            )
        launch = Launch(self.folder / name, process, log, mark)
        try:
            yield launch
        finally:
            while left := launch.family():
                for each in left:
                    with contextlib.suppress(psutil.Error):
                        each.kill()
                process.poll()  # reaps the launcher
                time.sleep(0.05)
            process.wait()

    def train(self, name: str, yaml: str, *options: str, seconds: int = 500, **launch: Any) -> Run:
        """Train in the folder `name`, until the end; Failed after `seconds`. `launch` are arguments of `started`."""
        with self.started(name, yaml, *options, **launch) as running:
            return running.ended(seconds)
