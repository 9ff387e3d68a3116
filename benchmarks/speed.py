"""Real tokens per second of accel_sft and of other trainers, side by side, on the same rows and the same model.

    python benchmarks/speed.py --peers PYTHON [--shape NAME ...] [--rounds 5]

Contestants run in turns, a few optimizer steps each, in every round; medians over the rounds and their ratios are
printed as a table. The tokens of a row are counted alike for all, the instruction included. All report the first step's
loss, which must be the same: the same work is done.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import shapes

HERE = Path(__file__).parent


class Contestant:
    """A trainer in a process of its own that waits for its turn."""

    def __init__(self, name: str, python: str, script: str, **settings: object) -> None:
        self.name, self.speeds = name, []
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(os.cpu_count()),
            "HF_HUB_OFFLINE": "1",
            "DS_ACCELERATOR": "cpu",
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
            raise SystemExit(f"{self.name} ended:\n{self.log.read().decode()[-3000:]}")
        return json.loads(line)

    def run(self, steps: int, tokens: int) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.speeds.append(steps * self.facts.get("tokens_per_step", tokens) / self._answer()["seconds"])

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def field(args: argparse.Namespace, shape: shapes.Shape, common: dict) -> list[tuple]:
    """(name, python, script, settings) of every contestant."""
    ours = [("accel_sft", sys.executable, "ours.py", {})]
    if not args.peers:
        return ours
    small = min(args.rows_per_forward, shape.batch)
    grouped = {"train_sampling_strategy": "group_by_length"}
    packed = {"packing": True, "max_length": max(512, shape.question[1] + shape.answer[1] + shape.instruction)}
    return [
        *ours,
        ("Trainer, fixed padding", args.peers, "trainer.py", {"rows_per_forward": small}),
        ("TRL", args.peers, "trl_sft.py", {"rows_per_forward": small}),
        ("TRL, grouped by length", args.peers, "trl_sft.py", {"rows_per_forward": small, "options": grouped}),
        ("TRL, packed", args.peers, "trl_sft.py", {"rows_per_forward": 1, "batch": 1, "options": packed}),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", help="Python of an environment with benchmarks/peers.txt; none: accel_sft alone.")
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows-per-forward", type=int, default=8, help="Of the other trainers.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.make_model(folder / "model")
        for chosen in args.shape or shapes.SHAPES:
            shape = shapes.SHAPES[chosen]
            tokens, supervised = shapes.write(folder, chosen)
            print(
                f"\n## {chosen}: {shape.batch} rows a step, {tokens:,} tokens, {supervised:,} supervised\n", flush=True
            )
            common = {"model": str(folder / "model"), "rows": str(folder / f"{chosen}.json"), "batch": shape.batch}
            contestants = []
            for label, python, script, settings in field(args, shape, common):
                contestants.append(Contestant(label, python, script, **{**common, **settings}))
            for _ in range(args.rounds):
                for contestant in contestants:
                    contestant.run(shape.steps, tokens)
            print("| trainer | real tokens/s | supervised/s | accel_sft is | first loss |")
            print("|---|---|---|---|---|")
            best = statistics.median(contestants[0].speeds)
            for contestant in contestants:
                speed = statistics.median(contestant.speeds)
                extra = f" ({contestant.facts['batching']})" if "batching" in contestant.facts else ""
                print(
                    f"| {contestant.name}{extra} | {speed:,.0f} | {speed * supervised / tokens:,.0f} "
                    f"| {best / speed:.2f}x | {contestant.facts.get('loss', float('nan')):.5f} |",
                    flush=True,
                )
                contestant.stop()


if __name__ == "__main__":
    main()
