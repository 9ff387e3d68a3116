"""Compares bfloat16 with float32 in accel_sft itself, on a CPU: real tokens per second, and the first step's loss.

    python benchmarks/precision.py [--shape NAME ...] [--launch NAME ...] [--rounds 5] [--smoke]

The model is a Qwen2 of about 100 million parameters with random weights (`--hidden`, `--layers`, `--vocabulary`); a
step has few rows. Each launch is a process of its own, as `accelerate launch` would set it up (one rank, all cores).
Launches take turns, a step each, in every round. Their weights and optimizer states take about 7 GiB together.
"""

from __future__ import annotations

import dataclasses
import socket
import statistics
import sys
import tempfile
from pathlib import Path

import shapes
import smoke
from speed import Contestant

ROWS = {"series-a": 16, "long-instruction": 8}
LAUNCHES = {"fp32": ("no", None), "bf16": ("bf16", None), "bf16, ZeRO-2": ("bf16", 2)}


def variables(precision: str, stage: int | None) -> dict[str, str]:
    """The environment variables that `accelerate launch` gives a single rank."""
    found = {"ACCELERATE_MIXED_PRECISION": precision}
    if stage is not None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
        found |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        found |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        found |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}
    return found


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--shape", action="append", choices=ROWS)
    parser.add_argument(
        "--launch", action="append", choices=LAUNCHES, help="Launches to compare with fp32; may be repeated."
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=20_480)
    args = smoke.parse(parser, shape=["series-a"], launch=["bf16, ZeRO-2"], rounds=1, hidden=64, layers=2, vocabulary=0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes.make_model(folder / "model", args.hidden, args.layers, args.vocabulary)
        for shape in args.shape or ROWS:
            file = folder / f"{shape}.json"
            tokens, supervised = shapes.write(file, dataclasses.replace(shapes.SHAPES[shape], batch=ROWS[shape]))
            settings = {"model": str(folder / "model"), "rows": str(file), "batch": ROWS[shape]}
            launches = [
                Contestant(label, sys.executable, "ours.py", variables(*LAUNCHES[label]), **settings)
                for label in (LAUNCHES if args.launch is None else dict.fromkeys(["fp32", *args.launch]))
            ]
            for _ in range(args.rounds):
                for launch in launches:
                    launch.run(1, tokens)
            print(f"\n## {shape}: {ROWS[shape]} rows a step, {tokens:,} tokens, {supervised:,} supervised\n")
            print("| precision | real tokens/s | fp32 is 1 | first loss |")
            print("|---|---|---|---|")
            fp32 = statistics.median(launches[0].speeds)
            for launch in launches:
                speed = statistics.median(launch.speeds)
                print(
                    f"| {launch.name} ({launch.facts['batching']}) | {speed:,.0f} | {speed / fp32:.2f} "
                    f"| {launch.facts['loss']:.5f} |",
                    flush=True,
                )
                launch.stop()


if __name__ == "__main__":
    main()
