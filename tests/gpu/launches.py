"""One launch of the trainer for a check of tests/gpu: its command, its losses, and what it said when it failed."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
CONFIGS = ROOT / "accelerate_configs"


class Failed(Exception):
    """A check does not hold; the message says what was seen."""


@dataclass
class Run:
    """A launch that has ended: its folder, its exit status, what it printed."""

    folder: Path
    status: int
    output: str

    def expect(self, status: int = 0) -> Run:
        if self.status != status:
            said = [line for line in self.output.splitlines() if "rror" in line] or self.output.splitlines()[-3:]
            raise Failed(f"{self.folder.name} ended with {self.status}: {' / '.join(said[:3])[:400]}")
        return self

    @property
    def losses(self) -> list[float]:
        lines = map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
        return [line["loss"] for line in lines if "loss" in line]

    @property
    def result(self) -> dict:
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
class Machine:
    """Where checks run: a folder for their runs and models, and the environment of their processes."""

    folder: Path
    tiny: bool = False
    environment: dict[str, str] = field(default_factory=lambda: {**os.environ, "PYTHONUNBUFFERED": "1"})

    def __post_init__(self) -> None:
        self.environment["ACCEL_SFT_CACHE"] = str(self.folder / "cache")

    def command(self, name: str, yaml: str, *options: str, launcher: tuple[str, ...] = ()) -> list[str]:
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIGS / f"{yaml}.yaml")]
        launch += [
            "--num_processes",
            "1",
            *launcher,
            "-m",
            "accel_sft",
            "math",
            "--output-dir",
            str(self.folder / name),
        ]
        return [*launch, *options]

    def train(
        self,
        name: str,
        yaml: str,
        *options: str,
        launcher: tuple[str, ...] = (),
        environment: dict[str, str] | None = None,
        seconds: int = 500,
    ) -> Run:
        """Train `math` in the folder `name`; ended after `seconds` at the latest."""
        command = self.command(name, yaml, *options, launcher=launcher)
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**self.environment, **(environment or {})},
            cwd=self.folder,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher then ends its ranks
            output, _ = process.communicate()
            raise Failed(f"{name} was not done in {seconds} s: {output[-300:]}") from None
        return Run(self.folder / name, process.returncode, output)

    def interrupted(self, name: str, yaml: str, *options: str, whom: str, launcher: tuple[str, ...] = ()) -> Run:
        """Train until the first checkpoint is there, then send SIGTERM to the launcher or SIGKILL to its `rank`."""
        import psutil

        with (self.folder / f"{name}.log").open("w+") as log:
            command = self.command(name, yaml, *options, launcher=launcher)
            process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment, cwd=self.folder)
            until = time.monotonic() + 300
            while not any((self.folder / name / "checkpoints").glob("step-*")):
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    raise Failed(f"{name} made no checkpoint: {Path(log.name).read_text()[-300:]}")
                time.sleep(0.05)
            if whom == "rank":
                for child in psutil.Process(process.pid).children():
                    if child.environ().get("RANK") == "0":
                        child.send_signal(signal.SIGKILL)
            else:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(300)
            except subprocess.TimeoutExpired:
                process.kill()
                raise Failed(f"{name} was not over 300 s after the signal") from None
            return Run(self.folder / name, process.returncode, Path(log.name).read_text())

    def benchmark(self, *arguments: str, seconds: int) -> str:
        """One line for each row of benchmarks/gpu.py; Failed if a row says why it did not run."""
        command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--timeout", str(seconds), *arguments]
        command += ["--folder", str(self.folder), *(["--tiny"] if self.tiny else [])]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment)
        rows = [line for line in done.stdout.splitlines() if line.startswith("| ")]
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
        shown = "; ".join(f"{row[2]}: {row[3]} tokens/s, MFU {row[4]}, {row[5]} GiB" for row in cells[1:])
        if done.returncode or not cells[1:] or any(row[-1] == "-" for row in cells[1:]):
            raise Failed(shown or done.stderr[-300:])
        return shown
