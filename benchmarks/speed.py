"""Real tokens per second of accel_sft and of other trainers, side by side, on the same rows and the same model.

    python benchmarks/speed.py --peers PYTHON [--llamafactory PYTHON] [--shape NAME ...] [--rounds 5] [--smoke]

Contestants run in turns, a few optimizer steps each, in every round; medians over the rounds and their ratios are
printed as a table. The tokens of a row are counted alike for all, the instruction included. All report the first step's
loss, which must be the same: the same work is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import shapes
import smoke

HERE = Path(__file__).parent


class Ended(Exception):
    """A contestant ended by itself; the message is what it said before."""


class Contestant:
    """A trainer in its own process, which waits for its turn.

    Args:
        variables: environment variables besides those that are the same for all.
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

    def run(self, steps: int, tokens: int) -> None:
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        self.speeds.append(steps * self.facts.get("tokens_per_step", tokens) / self._answer()["seconds"])

    def stop(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def field(args: argparse.Namespace, shape: shapes.Shape) -> list[tuple]:
    """(name, python, script, settings) for every contestant."""
    found = [("accel_sft", sys.executable, "ours.py", {})]
    small = {"rows_per_forward": min(args.rows_per_forward, shape.batch)}
    packs, longest = {"rows_per_forward": 1, "batch": 1}, max(512, shape.longest)
    grouped = {"train_sampling_strategy": "group_by_length"}
    if args.peers:
        packed = {"packing": True, "max_length": longest}
        found += [
            ("Trainer, fixed padding", args.peers, "trainer.py", small),
            ("TRL", args.peers, "trl_sft.py", small),
            ("TRL, grouped by length", args.peers, "trl_sft.py", {**small, "options": grouped}),
            ("TRL, packed", args.peers, "trl_sft.py", {**packs, "options": packed}),
        ]
    if args.llamafactory:
        # LLaMA-Factory pads packs to a multiple of 8, but not their positions
        script, packed = "llamafactory_sft.py", {"packing": True, "cutoff_len": -(-longest // 8) * 8}
        found += [
            ("LLaMA-Factory", args.llamafactory, script, small),
            ("LLaMA-Factory, grouped by length", args.llamafactory, script, {**small, "options": grouped}),
            ("LLaMA-Factory, packed", args.llamafactory, script, {**packs, "options": packed}),
            (
                "LLaMA-Factory, neat_packing",
                args.llamafactory,
                script,
                {**packs, "options": {**packed, "neat_packing": True}},
            ),
        ]
    return found


@contextlib.contextmanager
def leaving_out(contestants: list[Contestant], name: str) -> Iterator[None]:
    """While inside, a peer that ends by itself is reported and left out; if accel_sft ends, everything ends."""
    try:
        yield
    except (Ended, BrokenPipeError) as error:
        if name == "accel_sft":
            raise SystemExit(str(error)) from None
        contestants[:] = [contestant for contestant in contestants if contestant.name != name]
        print(f"{name} is left out: {str(error).splitlines()[-1] if str(error) else 'it ended'}\n", flush=True)


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument(
        "--peers", metavar="PYTHON", help="Python of an environment with benchmarks/peers.txt; none: accel_sft alone."
    )
    parser.add_argument("--llamafactory", metavar="PYTHON", help="Likewise, with benchmarks/peers-llamafactory.txt.")
    parser.add_argument("--shape", action="append", choices=shapes.SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows-per-forward", type=int, default=8, help="Of the other trainers.")
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    args = smoke.parse(parser, shape=["series-a"], rounds=1, hidden=64, layers=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.make_model(folder / "model", args.hidden, args.layers)
        for chosen in args.shape or shapes.SHAPES:
            shape = shapes.SHAPES[chosen]
            tokens, supervised = shapes.write(folder / f"{chosen}.json", shape)
            print(
                f"\n## {chosen}: {shape.batch} rows a step, {tokens:,} tokens, {supervised:,} supervised\n", flush=True
            )
            common = {"model": str(folder / "model"), "rows": str(folder / f"{chosen}.json"), "batch": shape.batch}
            contestants = []
            for label, python, script, settings in field(args, shape):
                with leaving_out(contestants, label):
                    contestants.append(Contestant(label, python, script, **{**common, **settings}))
            for _ in range(args.rounds):
                for contestant in list(contestants):
                    with leaving_out(contestants, contestant.name):
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
