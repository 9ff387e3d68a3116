"""Tests whether the batching that accel_sft chooses is the fastest that a user can set, and the same at each start.

    python benchmarks/batching.py [--job NAME ...] [--rounds 5]     the choice against each fixed batching, in turns
    python benchmarks/batching.py [--job NAME ...] --starts 20      what 20 starts choose beside two busy processes

Contestants take a few optimizer steps each, in every round; medians over the rounds and their ratios are printed as a
table. `cluener` has rows of CLUENER 2020's lengths, read by the `ner` task; the other jobs are shapes.py's.
"""

from __future__ import annotations

import collections
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

import shapes
import smoke
from accel_sft.models.tiny import train_tokenizer
from accel_sft_ner.task import SYSTEM_PROMPT
from speed import Contestant

CLUENER = "cluener"
JOBS = ("series-a", "series-b", "long-instruction", CLUENER)
TYPES = ("address", "book", "company", "game", "government", "movie", "name", "organization", "position", "scene")
CLUENER_ROWS, CLUENER_BATCH, CLUENER_STEPS = 640, 64, 2
LAYOUTS = ("shared", "packed", "padded")
ROWS = (4, 8, 16, 32, 64)
COPIED = "the default, its prefix copied for each row"
"""A contestant without the CPU kernel for shared prefixes, to show what the kernel saves."""
SPIN = "while True: pass"


def cluener_rows(count: int, seed: int = 0) -> list[dict]:
    """Sentences of 37 characters on average and 50 at most, with one to four entities of two to seven characters."""
    draw = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(np.clip(draw.normal(37.4, 10.7), 8, 50))
        text = "".join(chr(0x4E00 + n) for n in draw.integers(0, 2000, length))
        label: dict[str, dict[str, list[list[int]]]] = {}
        for _ in range(draw.integers(1, 5)):
            first = int(draw.integers(0, length - 7))
            last = first + int(draw.integers(1, 7))
            label.setdefault(str(draw.choice(TYPES)), {})[text[first : last + 1]] = [[first, last]]
        rows.append({"text": text, "label": label})
    return rows


def make(folder: Path, job: str, hidden: int, layers: int) -> dict:
    """Write the job's rows and its model; return a contestant's settings."""
    if job != CLUENER:
        shape = shapes.SHAPES[job]
        shapes.make_model(folder / "model", hidden, layers)
        shapes.write(folder / "rows.json", shape)
        return {"model": str(folder / "model"), "rows": str(folder / "rows.json"), "batch": shape.batch}
    rows = cluener_rows(CLUENER_ROWS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    answers = [json.dumps(row["label"], ensure_ascii=False) for row in rows]
    tokenizer = train_tokenizer([SYSTEM_PROMPT, *(row["text"] for row in rows), *answers])
    shapes.make_model(folder / "model", hidden, layers, tokenizer=tokenizer)
    return {"model": str(folder / "model"), "rows": str(folder / "rows.jsonl"), "batch": CLUENER_BATCH}


def against_fixed(job: str, common: dict, rounds: int, layouts: Sequence[str], sizes: Sequence[int]) -> None:
    steps = CLUENER_STEPS if job == CLUENER else shapes.SHAPES[job].steps
    sizes = [size for size in sizes if size <= common["batch"]]
    fixed = [{"batching": layout, "micro_batch_size": str(size)} for layout in layouts for size in sizes]
    contestants = [
        Contestant(" ".join(options.values()) or "the default", sys.executable, "ours.py", options=options, **common)
        for options in ({}, *fixed)
    ]
    contestants.append(Contestant(COPIED, sys.executable, "ours.py", copied=True, **common))
    for _ in range(rounds):
        for contestant in contestants:
            contestant.run(steps, 1)
    seconds = {each.name: statistics.median(1 / speed for speed in each.speeds) for each in contestants}
    default, *others = contestants
    fastest = min((each for each in others if each.name != COPIED), key=lambda each: seconds[each.name])
    print(f"\n## {job}: the default takes {default.facts['batching']}\n")
    print("| batching | s a step | the default takes |\n|---|---|---|")
    for each in sorted(contestants, key=lambda each: seconds[each.name]):
        told = seconds[default.name] / seconds[each.name]
        print(f"| {each.name} | {seconds[each.name]:.3f} | {told:.2f}x |")
        each.stop()
    ratios = [own / other for own, other in zip(fastest.speeds, default.speeds, strict=True)]
    print(
        f"\nThe default takes {statistics.median(ratios):.3f} of the time of the fastest fixed one, {fastest.name}",
        flush=True,
    )


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """While inside, `count` processes keep a core busy each."""
    spinning = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def starts(job: str, common: dict, count: int) -> None:
    chosen: collections.Counter[str] = collections.Counter()
    with busy_processes(2):
        for _ in range(count):
            with tempfile.TemporaryDirectory() as cache:  # without anything that an earlier start kept
                variables = {"ACCEL_SFT_CACHE": cache}
                contestant = Contestant("the default", sys.executable, "ours.py", variables, warmup_steps=1, **common)
            chosen[contestant.facts["batching"]] += 1
            contestant.stop()
    told = ", ".join(f"{what} {times} times" for what, times in chosen.most_common())
    print(f"| {job} | {max(chosen.values())} of {count} | {told} |", flush=True)


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=0)
    parser.add_argument(
        "--layout", action="append", choices=LAYOUTS, help="Layout of the fixed batchings; may be repeated."
    )
    parser.add_argument(
        "--rows", type=int, action="append", help="Rows a forward of the fixed batchings; may be repeated."
    )
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--layers", type=int, default=6)
    args = smoke.parse(parser, job=["series-a"], rounds=1, layout=["shared"], rows=[16], hidden=64, layers=2)
    if args.starts:
        print("| job | same batching | what was chosen |\n|---|---|---|", flush=True)
    for job in args.job or JOBS:
        with tempfile.TemporaryDirectory() as name:
            common = make(Path(name), job, args.hidden, args.layers)
            if args.starts:
                starts(job, common, args.starts)
            else:
                against_fixed(job, common, args.rounds, args.layout or LAYOUTS, args.rows or ROWS)


if __name__ == "__main__":
    main()
