"""Real tokens per second of accel_sft and of other trainers, side by side, on the same rows and the same model.

    python benchmarks/speed.py --peers PYTHON [--llamafactory PYTHON] [--shape NAME ...] [--rounds 5] [--smoke]

Only two trainers are in memory at a time: accel_sft, one other trainer, and this machine's best matrix product run in
turns, a few optimizer steps each, in every round. The table has medians over the rounds, and medians of the ratios
within a round. Other trainers are tried once with several numbers of rows a forward; the best number counts.

The tokens of a row are counted alike for all, the instruction included. All report the first step's loss, which must be
the same, as all do the same work. Useful FLOPs are those that no trainer can save: a step's distinct tokens once (what
rows share at their beginning is one token), the head where a token is learnt, and causal attention. Their number per
second, as a share of the best product over the step's own shapes, says how much of the machine is used. The
multiplications that a trainer really does are counted in a step of its warm-up.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shapes
import smoke
from accel_sft.io.text import common_length
from accel_sft.launch.info import Launch
from accel_sft.launch.precision import cpu_flags, cpu_name
from accel_sft.memory.flops import model_flops
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_config, read_shape

HERE = Path(__file__).parent
BUSY = 0.1
"""Spread of the peak between rounds, as a share of its median, above which the machine is said to be busy."""
FORWARD = 4096
"""Maximum number of tokens in a product to be timed: the largest forward of accel_sft on a CPU."""
ROWS = (4, 8, 16, 32)
"""Numbers of rows a forward with which other trainers are tried."""
HEADINGS = """| trainer | real tokens/s | supervised/s | useful GFLOP/s | of the peak | accel_sft is | it multiplies \
| spread | first loss |
|---|---|---|---|---|---|---|---|---|"""
"""The table's. "accel_sft is": times as fast as the trainer; "it multiplies": times as many FLOPs as accel_sft."""
WORD = 5
"""Characters of a word, which is a token."""


class Ended(Exception):
    """A contestant ended by itself; the message is its last output."""


class Contestant:
    """A trainer in its own process, which waits for its turn.

    Args:
        variables: environment variables in addition to those that are the same for all.
    """

    def __init__(
        self, name: str, python: str, script: str, variables: dict[str, str] | None = None, **settings: object
    ) -> None:
        self.name, self.speeds = name, []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "GOMP_SPINCOUNT": "5000",  # accel_sft sets it itself; without it other programs slow the peers more
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
            "TMPDIR": str(Path(settings["rows"]).parent),  # what it leaves is deleted with the rows
            **(variables or {}),
        }
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        command = [python, str(HERE / "contestants" / script), json.dumps({"warmup_steps": 2, **settings})]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, env=environment
        )
        self.facts = self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            told = self.log.read().decode(errors="replace").strip()
            raise Ended(f"{self.name} ended: {told[-3000:]}")
        return json.loads(line)

    def run(self, steps: int, tokens: int) -> dict:
        """Let it make so many steps, of `tokens` real tokens unless it reported another number; return its answer."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        answer = self._answer()
        self.speeds.append(steps * self.facts.get("tokens_per_step", tokens) / answer["seconds"])
        return answer

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def field(args: argparse.Namespace, shape: shapes.Shape) -> list[tuple]:
    """(name, python, script, settings) for every other trainer; `rows_per_forward` is missing if it is to be tried."""
    found: list[tuple] = []
    packs, longest = {"rows_per_forward": 1, "batch": 1}, max(512, shape.longest)
    grouped = {"train_sampling_strategy": "group_by_length"}
    if args.peers:
        packed = {"packing": True, "max_length": longest}
        found += [
            ("Trainer, fixed padding", args.peers, "trainer.py", {}),
            ("TRL", args.peers, "trl_sft.py", {}),
            ("TRL, grouped by length", args.peers, "trl_sft.py", {"options": grouped}),
            ("TRL, packed", args.peers, "trl_sft.py", {**packs, "options": packed}),
        ]
    if args.llamafactory:
        # LLaMA-Factory pads packs to a multiple of 8, but not their positions
        script, packed = "llamafactory_sft.py", {"packing": True, "cutoff_len": -(-longest // 8) * 8}
        found += [
            ("LLaMA-Factory", args.llamafactory, script, {}),
            ("LLaMA-Factory, grouped by length", args.llamafactory, script, {"options": grouped}),
            ("LLaMA-Factory, packed", args.llamafactory, script, {**packs, "options": packed}),
            (
                "LLaMA-Factory, neat_packing",
                args.llamafactory,
                script,
                {**packs, "options": {**packed, "neat_packing": True}},
            ),
        ]
    return found


@dataclasses.dataclass(frozen=True)
class Work:
    """What a step of a shape's rows needs, whoever trains on them.

    Attributes:
        tokens: real tokens, each row's own.
        flops: useful FLOPs.
        products: (tokens, inputs, outputs) of the step's matrix products.
    """

    tokens: int
    supervised: int
    distinct: int
    flops: float
    products: list[tuple[int, int, int]]


def work_of(model: Path, rows: Path, tokens: int, supervised: int) -> Work:
    texts = sorted(f"{row['instruction']}{row['question']}{row['answer']}" for row in json.loads(rows.read_text()))
    lengths = [len(text) // WORD + 1 for text in texts]  # and the end-of-turn token
    shared = [0, *(common_length(pair) // WORD for pair in itertools.pairwise(texts))]
    distinct = sum(lengths) - sum(shared)
    pairs = sum(length**2 - common**2 for length, common in zip(lengths, shared, strict=True)) / 2
    shape = read_shape(read_config(model), str(model))
    flops = model_flops(Job(shape=shape, launch=Launch({}, None, "", {}, None, {}, {}), device="cpu"))
    sizes = {(matrix.inputs, matrix.outputs) for block in shape.blocks for matrix in block.matrices}
    products = [(min(distinct, FORWARD), *each) for each in sorted(sizes)]
    products.append((min(supervised, FORWARD), shape.hidden_size, shape.vocab_size))
    return Work(tokens, supervised, distinct, flops.total(distinct, supervised, pairs), products)


class Race:
    """accel_sft and this machine's peak, against which other trainers run one at a time."""

    def __init__(self, args: argparse.Namespace, shape: shapes.Shape, work: Work, common: dict[str, Any]) -> None:
        self.args, self.shape, self.work = args, shape, work
        self.common = {**common, "count": True}
        precisions = ["float32", *(["bfloat16"] if cpu_flags() else [])]
        peak = {"precisions": precisions, "products": work.products, "warmup_steps": 1}
        try:
            self.ours = Contestant("accel_sft", sys.executable, "ours.py", **self.common)
            self.peak = Contestant("the peak", sys.executable, "peak.py", **common, **peak)
        except Ended as error:
            raise SystemExit(str(error)) from None
        self.peaks: list[dict[str, tuple[float, list[int]]]] = []
        self.shares: dict[str, list[float]] = {}
        print(HEADINGS, flush=True)

    def rounds(self, other: Contestant | None) -> None:
        """Let accel_sft, the other trainer, and the peak run in turns."""
        runners = [self.ours, *([other] if other else [])]
        for _ in range(self.args.rounds):
            for each in runners:
                each.run(self.shape.steps, self.work.tokens)
            self.peaks.append(self.peak.run(1, 1)["peaks"])
            for each in runners:
                useful = each.speeds[-1] * self.work.flops / self.work.tokens
                self.shares.setdefault(each.name, []).append(useful / self.peaks[-1]["float32"][0])

    def against(self, name: str, python: str, script: str, settings: dict[str, Any]) -> None:
        """Run another trainer and print its line of the table; one that ends by itself is reported and left out."""
        try:
            sizes = self.args.rows_per_forward or ROWS
            more = {**self.common, **settings}
            other = at_its_best(self.shape, sizes, self.work.tokens, name, python, script, **more)
            self.rounds(other)
        except (Ended, BrokenPipeError) as error:
            if self.ours.process.poll() is not None or self.peak.process.poll() is not None:
                raise SystemExit(str(error)) from None
            left_out(name, error)
            return
        self._line(other, self.ours.speeds[-len(other.speeds) :])
        other.stop()

    def _line(self, each: Contestant, ours: Sequence[float]) -> None:
        """Print a line of the table; `ours` has accel_sft's speeds in the same rounds."""
        work, speed = self.work, statistics.median(each.speeds)
        ratio = statistics.median(one / other for one, other in zip(ours, each.speeds, strict=True))
        done = [c.facts["flops"] / c.facts.get("tokens_per_step", work.tokens) for c in (each, self.ours)]
        told = f" ({each.facts['batching']})" if "batching" in each.facts else ""
        print(
            f"| {each.name}{told} | {speed:,.0f} | {speed * work.supervised / work.tokens:,.0f} "
            f"| {speed * work.flops / work.tokens / 1e9:.1f} | {statistics.median(self.shares[each.name]):.0%} "
            f"| {ratio:.2f}x | {done[0] / done[1]:.2f}x | {spread(each.speeds):.0%} "
            f"| {each.facts.get('loss', float('nan')):.5f} |",
            flush=True,
        )

    def end(self) -> None:
        """Print accel_sft's own line, the peak and whether the machine was busy; stop the processes that still run."""
        if not self.ours.speeds:
            self.rounds(None)
        self._line(self.ours, self.ours.speeds)
        print()
        for precision in self.peaks[0]:
            found = [each[precision] for each in self.peaks]
            product = " x ".join(f"{size:,}" for size in max(found)[1])
            reached = statistics.median(flops for flops, _ in found) / 1e9
            print(f"The peak of matrix products in {precision} is {reached:,.0f} GFLOP/s, at best {product}.")
        varied = spread([each["float32"][0] for each in self.peaks])
        busy = "the machine is busy, compare ratios only" if varied > BUSY else "the machine is quiet"
        print(
            f"{self.work.flops / 1e9:.1f} GFLOPs of a step are useful, {self.work.distinct:,} distinct tokens; "
            f"accel_sft computes {self.ours.facts['flops'] / 1e9:.1f}.\n"
            f"The float32 peak varied by {varied:.0%} between rounds: {busy}.",
            flush=True,
        )
        self.ours.stop()
        self.peak.stop()


def at_its_best(
    shape: shapes.Shape, sizes: Sequence[int], tokens: int, name: str, python: str, script: str, **settings: Any
) -> Contestant:
    """Start a trainer with the number of rows a forward that is fastest in one turn, unless `settings` has it."""
    if "rows_per_forward" in settings:
        return Contestant(name, python, script, **settings)
    best: Contestant | None = None
    for size in sorted({min(size, shape.batch) for size in sizes}):
        told = f"{name} ({size} rows a forward)"
        try:
            tried = Contestant(told, python, script, **settings, rows_per_forward=size)
            tried.run(shape.steps, tokens)
        except (Ended, BrokenPipeError) as error:
            left_out(told, error)
            continue
        slower = tried
        if best is None or tried.speeds[0] > best.speeds[0]:
            best, slower = tried, best
        if slower:
            slower.stop()
    if best is None:
        raise Ended("it ran with no number of rows a forward")
    best.speeds.clear()
    return best


def left_out(name: str, error: Exception) -> None:
    """Report on standard error that a trainer ended by itself."""
    print(f"{name} is left out: {(str(error).splitlines() or ['it ended'])[-1]}", file=sys.stderr, flush=True)


def spread(values: Sequence[float]) -> float:
    """The largest value's distance from the smallest one, as a share of the median."""
    return (max(values) - min(values)) / statistics.median(values)


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="Python of an environment with benchmarks/peers.txt; none: accel_sft alone."
    )
    parser.add_argument("--llamafactory", metavar="PYTHON", help="Python with benchmarks/peers-llamafactory.txt.")
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--rows-per-forward",
        type=int,
        action="append",
        help=f"Rows a forward to try the others with; may be repeated ({ROWS}).",
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    args = smoke.parse(parser, shape=["series-a"], rounds=1, rows_per_forward=[8], hidden=64, layers=2)
    print(f"{cpu_name()}, {os.cpu_count()} threads")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.make_model(folder / "model", args.hidden, args.layers)
        for chosen in args.shape or shapes.SHAPES:
            shape, rows = shapes.SHAPES[chosen], folder / f"{chosen}.json"
            tokens, supervised = shapes.write(rows, shape)
            print(
                f"\n## {chosen}: {shape.batch} rows a step, {tokens:,} tokens, {supervised:,} supervised\n", flush=True
            )
            common = {"model": str(folder / "model"), "rows": str(rows), "batch": shape.batch}
            race = Race(args, shape, work_of(folder / "model", rows, tokens, supervised), common)
            for peer in field(args, shape):
                race.against(*peer)
            race.end()


if __name__ == "__main__":
    main()
