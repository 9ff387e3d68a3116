"""What a GPU would feel of a step, and its memory, rehearsed on fake CUDA tensors: no GPU is needed.

    python benchmarks/gpu_rehearsal.py [--shapes 40] [--model 0.5B ...] [--keep FILE] [--smoke]

Each line is one rank of a launch (tests/support/rehearsal.py): how often the host waits for the device in a step of two
forwards, what ranks exchange, how many operators are launched, which kernels attention takes; and the peak of the
second step's memory by torch's MemTracker beside the closed form of `accel-sft plan`, without overhead.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.memory.estimate import estimate
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_shape
from plan_simulation import MODELS

ROOT = Path(__file__).parent.parent
MIB = 2**20
LAUNCHES = (("ddp", 8), ("fsdp2", 8), ("hsdp", 16))
LAYOUTS = (("shared", "rows"), ("packed", "rows"), ("padded", "causal"))


def cases(models: dict[str, dict[str, Any]], shapes: int) -> Iterator[dict[str, Any]]:
    """Every launch, adapter, layout and kind of activations, with a model and a length in turn, `shapes` in all."""
    kinds = [*itertools.product(("none", "lora"), (False, True), LAUNCHES, LAYOUTS)]
    lengths = itertools.cycle((500, 1000, 250))
    named = itertools.cycle(models.items())
    for number in range(shapes):
        adapter, recomputed, (launch, ranks), (layout, attention) = kinds[number % len(kinds)]
        name, model = next(named)
        yield {
            "name": name,
            "launch": launch,
            "ranks": ranks,
            "adapter": adapter,
            "layout": layout,
            "attention": attention,
            "gradient_checkpointing": recomputed,
            "instruction": 200,
            "answer": next(lengths) * (number // len(kinds) + 1),
            "rows": 8,
            "forwards": 2,
            "model": model,
            "export": False,
        }


def run(wanted: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The rehearsals' results, as they come."""
    told = json.dumps([{key: value for key, value in case.items() if key != "name"} for case in wanted])
    paths = (str(ROOT), str(ROOT / "tests/support"), os.environ.get("PYTHONPATH", ""))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, str(ROOT / "tests/support/rehearsal.py"), told]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise ChildProcessError(f"{command[1]} ended with {process.returncode}")


def predicted(case: dict[str, Any], found: dict[str, Any]) -> float:
    """The closed form's bytes of a device in a step, without the allocator's gaps and what is outside of torch."""
    tokens, supervised_tokens, rows, copied_keys = found["forward"]
    flags = ("--num_processes", str(case["ranks"]), "--mixed_precision", "bf16")
    job = Job(
        shape=read_shape(case["model"], "model"),
        launch=launch_of_yaml(ROOT / "accelerate_configs" / f"{case['launch']}.yaml", *flags),
        device="cuda",
        adapter=case["adapter"],
        gradient_checkpointing=case["gradient_checkpointing"],
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        rows=rows,
        copied_keys=copied_keys,
    )
    return sum(size for name, size in estimate(job).device["step"].items() if name != "overhead")


def measured(found: dict[str, Any]) -> int:
    """The tracker's bytes at the peak of the step."""
    return max(found["peak"].values())


def errors(wanted: list[dict[str, Any]]) -> list[float]:
    """How far the closed form is from the tracker in each case, as a share of the tracker's bytes."""
    return [abs(predicted(case, found) / measured(found) - 1) for case, found in zip(wanted, run(wanted), strict=True)]


def exchanged(found: dict[str, Any]) -> str:
    """How often ranks exchange in a step, by kind and part; the few numbers that they agree by are left out."""
    counted: Counter[str] = Counter()
    for part, kind, _, count, _ in found["exchanges"]:
        if part not in ("wait for ranks", "optimizer step"):
            counted[f"{kind} {'forward' if part == 'forward' else 'backward'}"] += count
    return ", ".join(f"{count} {name}" for name, count in counted.items())


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--shapes", type=int, default=40)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--layers", type=int, default=6, help="Cut models to so many layers.")
    parser.add_argument("--keep", type=Path, help="A file for all that was counted, one JSON a line.")
    asked = smoke.parse(parser, shapes=2, models=["0.5B"], layers=1)
    models = {name: {**MODELS[name], "num_hidden_layers": asked.layers} for name in asked.models}
    wanted = [*cases(models, asked.shapes)]
    print("| launch | ranks | training | rows | activations | model | tokens | host waits | exchanges |", end="")
    print(" launches | attention | tracked MiB | plan MiB | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    differences = []
    for case, found in zip(wanted, run(wanted), strict=True):
        if asked.keep:
            with asked.keep.open("a") as file:
                file.write(json.dumps({**found, "case": case}) + "\n")
        plan, tracked = predicted(case, found), measured(found)
        differences.append(plan / tracked - 1)
        kind = "full" if case["adapter"] == "none" else case["adapter"]
        cells = [case["launch"], str(case["ranks"]), kind, case["layout"]]
        cells += ["recomputed" if case["gradient_checkpointing"] else "kept", case["name"], str(found["forward"][0])]
        cells += [str(len(found["waits"])), exchanged(found), str(sum(found["launches"].values()))]
        cells += ["; ".join(sorted({name.split(",")[0] for name in found["attention"]}))]
        cells += [f"{tracked / MIB:,.0f}", f"{plan / MIB:,.0f}", f"{differences[-1]:+.1%}"]
        print(f"| {' | '.join(cells)} |", flush=True)
    mean = statistics.mean(map(abs, differences))
    print(f"memory: mean difference {mean:.1%}, worst {max(map(abs, differences)):.1%}, {len(differences)} shapes")


if __name__ == "__main__":
    main()
