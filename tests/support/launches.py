"""Launches of the trainer in the background: their commands, signals to their ranks, and what they left.

Every process that a launch starts inherits a mark in its environment. By it they are found wherever they have gone (the
launcher puts each rank into a session of its own), and none of them outlives its test.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from places import CONFIGS, SUPPORT

from accel_sft.launch import child

FLOAT32, BF16 = ("--mixed_precision", "no"), ("--mixed_precision", "bf16")
LEAVING_SECONDS = 40
"""Seconds after its launcher's end in which the last process of a launch must be gone: torchrun waits 30 for a rank."""


@dataclass(frozen=True)
class Launched:
    """A finished launch: its folder, exit status, everything it printed, how to launch it again, and how many of its
    processes were left."""

    run_dir: Path
    status: int
    output: str
    arguments: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    left: int = 0

    def expect(self, status: int = 0) -> Launched:
        assert not self.left, f"{self.left} processes were there {LEAVING_SECONDS} s after their launcher"
        assert self.status == status, f"{self.run_dir.name} ended with {self.status}: {self.output[-6000:]}"
        return self

    def says(self, pattern: str) -> str:
        """The first match of a pattern in what was printed, line breaks taken as blanks."""
        match = re.search(pattern, " ".join(self.output.split()))
        assert match, f"{self.run_dir.name} does not say {pattern!r}: {self.output[-6000:]}"
        return match[0]

    def lines(self, kind: str = "loss") -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that have `kind`: "loss" for training, "eval_loss" for evaluation."""
        text = (self.run_dir / "metrics.jsonl").read_text()
        return [line for line in map(json.loads, text.splitlines()) if kind in line]

    def losses(self) -> list[float]:
        return [line["loss"] for line in self.lines()]

    def result(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "result.json").read_text())

    def weights(self) -> str:
        """A hash of the final weights."""
        files = sorted((self.run_dir / "final").glob("*.safetensors"))
        assert files, f"{self.run_dir.name} has no weights in final/"
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


@dataclass
class Launch:
    """A launch that is running: its folder, its launcher, the file with what it prints, and its processes' mark."""

    folder: Path
    process: subprocess.Popen[bytes]
    log: Path
    mark: str

    def family(self) -> list[psutil.Process]:
        """All of its processes that are alive, the launcher included."""
        return child._marked(self.mark)

    def rank(self, number: int) -> psutil.Process:
        for process in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK", "0") == str(number):  # one process alone has none
                    return process
        raise AssertionError(f"{self.folder.name} has no rank {number}")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 300) -> None:
        """Wait for a condition; fail if the launch ends before it holds, or it takes longer than `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            over = self.process.poll() is not None or time.monotonic() > end
            assert not over, f"{self.folder.name}: {what} did not come: {self.log.read_text(errors='replace')[-6000:]}"
            time.sleep(0.05)

    def until_step(self, step: int) -> None:
        file = self.folder / "metrics.jsonl"
        self.until(lambda: file.exists() and file.read_text().count('"loss"') >= step, f"step {step}")

    def ended(self, seconds: float) -> Launched:
        """Wait for the end of the launcher and of all that it started."""
        status = self.process.wait(seconds)
        end = time.monotonic() + LEAVING_SECONDS
        while (left := self.family()) and time.monotonic() < end:
            time.sleep(0.2)
        return Launched(self.folder, status, self.log.read_text(errors="replace"), left=len(left))


@contextlib.contextmanager
def background(command: list[str], folder: Path, log: Path, environment: dict[str, str]) -> Iterator[Launch]:
    """Run a command in the background, of a run in `folder`; whatever of it is left in the end is killed."""
    mark = uuid.uuid4().hex
    own = {**environment, child.MARK: mark}
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=own, cwd=folder.parent, start_new_session=True
        )
    try:
        yield Launch(folder, process, log, mark)
    finally:
        child.kill_all(mark)
        process.wait()


@dataclass
class Machine:
    """Where tests run: a folder for their runs and models, how many GPUs and processes a launch has, the environment,
    and what several tests compare with. Without GPUs models are small, and launches have two processes."""

    folder: Path
    devices: int
    processes: int
    environment: dict[str, str]
    made: dict[str, Any] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The rank that the tests of faults harm."""
        return self.processes - 1

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gave when it was first asked for by this name."""
        if name not in self.made:
            self.made[name] = make()
        return self.made[name]

    def job(self, steps: int, *more: str) -> tuple[str, ...]:
        """Options of a job of `math` without evaluations."""
        rows = ("--train-examples", "2000" if self.devices else "200", "--validation-examples", "8")
        return ("--max-steps", str(steps), "--eval-every", "off", *rows, *more)

    def short(self, *more: str) -> tuple[str, ...]:
        """Options of the job whose curves are compared."""
        return self.job(20 if self.devices else 6, *more)

    def endless(self, *more: str) -> tuple[str, ...]:
        """Options of a job that will not end by itself while it is watched."""
        return self.job(100_000, "--save-every", "off", *more)

    def started(
        self,
        name: str,
        yaml: str,
        *options: str,
        launcher: tuple[str, ...] = (),
        processes: int = 0,
        task: str = "math",
        environment: dict[str, str] | None = None,
    ) -> contextlib.AbstractContextManager[Launch]:
        """A launch in the background, in the folder `name`; `yaml` is "" for one process without a launcher."""
        command = [sys.executable]
        if yaml:
            command += ["-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{yaml}.yaml")]
            command += ["--main_process_port", "0", "--num_processes", str(processes or self.processes), *launcher]
        fsdp = yaml.startswith(("fsdp", "hsdp"))
        command += ["-m", "fsdp2_on_cpu" if fsdp and not self.devices else "accel_sft"]
        command += [task, "--output-dir", str(self.folder / name), *options]
        log, own = self.folder / f"{name}.log", self.environment | (environment or {})
        return background(command, self.folder / name, log, own)

    def train(self, name: str, yaml: str, *options: str, **launch: Any) -> Launched:
        """Train in the folder `name`, until the end; `launch` are arguments of `started`."""
        with self.started(name, yaml, *options, **launch) as running:
            return running.ended(500)

    def reference(self) -> Launched:
        """The curve with which launches are compared: ddp on one process, in float32."""
        job = {"launcher": FLOAT32, "processes": 1}
        return self.once("reference", lambda: self.train("reference", "ddp", *self.short(), **job).expect())

    def needs(self, *operators: str, module: str = "") -> None:
        """Skip a test that needs a GPU, a module, or operators of DeepSpeed that this machine cannot compile."""
        if not self.devices:
            pytest.skip("needs a GPU")
        if module and importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
        self.compiles(*operators)

    def compiles(self, *operators: str) -> None:
        """Skip a test for these operators of DeepSpeed with the audit's reason, if this machine cannot compile them."""
        from accel_sft.launch.deepspeed_ops import audit_compilers

        if reasons := [finding.what for finding in audit_compilers(list(operators), self.devices)]:
            pytest.skip("; ".join(reasons))


def agree(reference: Launched, others: Iterable[Launched], within: float) -> None:
    """Print the largest relative difference of each run's losses; fail if one is too large."""
    apart = {}
    for run in others:
        pairs = list(zip(run.expect().losses(), reference.losses(), strict=True))
        apart[run.run_dir.name] = max(abs(loss - expected) / abs(expected) for loss, expected in pairs)
    print(", ".join(f"{name}: losses differ by {share:.1e}" for name, share in apart.items()))
    assert max(apart.values()) <= within


@pytest.fixture
def own_machine(tmp_path: Path) -> Machine:
    """Two processes on this machine's CPU, with the test's own folder."""
    return Machine(tmp_path, 0, 2, dict(os.environ))


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """This machine: all visible GPUs, or two processes on its CPU."""
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    # in a process of its own: this one never holds memory on a card
    devices = int(subprocess.check_output([sys.executable, "-c", code]).split()[-1])
    folder = tmp_path_factory.mktemp("launches")
    paths = os.pathsep.join(filter(None, (str(SUPPORT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "ACCEL_SFT_CACHE": str(folder / "cache"), "PYTHONPATH": paths}
    yield Machine(folder, devices, devices or 2, environment)
    for file in folder.rglob("*.safetensors"):  # large, and nobody wants them kept
        file.unlink()
