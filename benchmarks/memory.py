"""Host memory in training and the time to the first step, by number of training rows; first and second start.

    python benchmarks/memory.py [--rows 10000 100000 1000000] [--rounds 3] [--steps 100] [--smoke] [-- LAUNCHER ...]

Each run is the command line itself (`accel_sft math --train-file`), in one process or under the launcher named after
`--`, such as `accelerate launch --config_file accelerate_configs/z2.yaml`. The first start finds an empty cache. The
second starts take turns: every size once a round. Unique memory (USS: what would be free without the process) is
sampled ten times a second from the first step on; of several ranks the largest USS counts. Another trainer is stopped
meanwhile: it shares the libraries' code, so that this code does not count, whatever else runs on the machine. The start
is timed from the command to the first line of metrics.jsonl; on a busy machine, compare the CPU time of all its
processes instead.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

import smoke

PREFIX = "Answer: "


@dataclasses.dataclass
class Start:
    """One run: seconds and CPU seconds from the command to the first step, and unique memory in training, in MiB."""

    seconds: float
    cpu_seconds: float
    median_mib: float
    peak_mib: float


def write_rows(path: Path, count: int, seed: int, odd: int) -> None:
    """Write rows like those of series A, about even or odd numbers, so that training and validation share none."""
    draw = np.random.default_rng(seed)
    with path.open("w", encoding="utf-8") as file:
        for begin in range(0, count, 100_000):
            size = min(100_000, count - begin)
            sums = draw.integers(2, 5 * 10**8, size) * 2 + odd
            firsts = (draw.random(size) * (sums - 1)).astype(np.int64) + 1
            for number, first in zip(sums.tolist(), firsts.tolist(), strict=True):
                answer = f"{PREFIX}{first} + {number - first}"
                file.write(f'{{"instruction": "{number}=", "input": "", "output": "{answer}"}}\n')


def make_model(folder: Path) -> None:
    """Save the built-in model with a tokenizer for such rows, so that a run need not build it: the data is timed."""
    from accel_sft.models.tiny import build_tiny

    draw = np.random.default_rng(0).integers(2, 10**9, 2000)
    build_tiny(folder, [text for n in draw for text in (f"{n}=", f"{PREFIX}{n // 3} + {n - n // 3}")], 0)


def ranks_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes that train: the accel_sft processes among `process` and its descendants that have no children."""
    family = [process, *process.children(recursive=True)]
    parents = {child.ppid() for child in family}
    return [each for each in family if each.pid not in parents and "accel_sft" in " ".join(each.cmdline())]


def to_first_step(command: list[str], folder: Path, cache: Path) -> tuple[subprocess.Popen, float]:
    """Start a run in `folder`; return it after its first step, and the seconds since the command."""
    environment = {**os.environ, "ACCEL_SFT_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    metrics, log = folder / "metrics.jsonl", folder.with_suffix(".log")
    begun = time.perf_counter()
    with log.open("wb") as output:
        command = [*command, "--output-dir", str(folder)]
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    while process.poll() is None:
        if metrics.exists() and metrics.stat().st_size:
            return process, time.perf_counter() - begun
        time.sleep(0.01)
    raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def entries(cache: Path) -> set[Path]:
    """The entries of the cache, which keeps each kind in its own folder."""
    return set(cache.glob("*/[!.]*"))


def run(command: list[str], folder: Path, cache: Path, again: bool) -> Start:
    """Train in `folder` and measure; with `again` the tokens must be in the cache, else they must not be."""
    before = entries(cache)
    process, seconds = to_first_step(command, folder, cache)
    if (entries(cache) == before) != again:
        process.kill()
        raise SystemExit(f"{folder}: tokens were {'not ' if again else ''}in the cache already")
    watched, samples = psutil.Process(process.pid), []
    times = [each.cpu_times() for each in (watched, *watched.children(recursive=True))]
    while process.poll() is None:
        try:
            samples.append(max(rank.memory_full_info().uss for rank in ranks_of(watched)) / 2**20)
        except (psutil.Error, ValueError):  # the process is ending
            continue
        time.sleep(0.1)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    if len(samples) < 2:
        raise SystemExit(f"{folder}: over before its memory was read twice; ask for more --steps")
    samples = samples[: -max(len(samples) // 10, 1)]  # at the end weights are exported: this is not training
    cpu_seconds = sum(time.user + time.system for time in times)
    return Start(seconds, cpu_seconds, statistics.median(samples), max(samples))


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3, help="Second starts of each size.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("launcher", nargs="*", help="After --: the launcher; none: one process.")
    args = smoke.parse(parser, rows=[2000], rounds=1, steps=8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        write_rows(folder / "validation.jsonl", 100, 1, 1)

        def command(rows: int, steps: int, launcher: list[str]) -> list[str]:
            files = ["--train-file", f"{folder}/{rows}.jsonl", "--validation-file", f"{folder}/validation.jsonl"]
            sizes = ["--max-steps", str(steps), "--global-batch-size", "64", "--micro-batch-size", "64"]
            settings = ["--model", f"{folder}/model", "--eval-every", "off", "--save-every", "off", *sizes]
            return [*launcher, "-m", "accel_sft", "math", *settings, "--batching", "shared", *files]

        for count in {1000, *args.rows}:
            write_rows(folder / f"{count}.jsonl", count, 0, 0)
        still, _ = to_first_step(command(1000, 10**6, [sys.executable]), folder / "still", folder / "cache")
        still.send_signal(signal.SIGSTOP)
        try:
            firsts, seconds = {}, {count: [] for count in args.rows}
            launcher = args.launcher or [sys.executable]
            for number in range(-1, args.rounds):
                for count in args.rows:
                    again, place = number >= 0, folder / f"{count}-{number}"
                    found = run(command(count, args.steps, launcher), place, folder / "cache", again)
                    if not again:
                        firsts[count] = found
                    else:
                        seconds[count].append(found)
        finally:
            still.kill()
        print(
            "| rows | first start | second start | its CPU time | USS median | USS peak | after a first start | peak |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for count in args.rows:
            first, again = firsts[count], seconds[count]
            middle = {
                field.name: statistics.median(getattr(each, field.name) for each in again)
                for field in dataclasses.fields(Start)
            }
            cells = [f"{count:,}", f"{first.seconds:.1f} s", f"{middle['seconds']:.2f} s"]
            cells.append(f"{middle['cpu_seconds']:.2f} s")
            memory = (middle["median_mib"], middle["peak_mib"], first.median_mib, first.peak_mib)
            print(f"| {' | '.join([*cells, *(f'{mib:,.0f} MiB' for mib in memory)])} |", flush=True)
            told = ", ".join(f"{each.seconds:.2f} ({each.cpu_seconds:.2f})" for each in again)
            print(f"seconds (CPU seconds) of each second start: {told}", file=sys.stderr)


if __name__ == "__main__":
    main()
