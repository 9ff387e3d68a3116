"""Host memory per rank that `accel-sft plan` predicts, against what training takes on a CPU, by phase.

    python benchmarks/plan_accuracy.py [--cases held-out] [--keep FILE] [--smoke]
    python benchmarks/plan_accuracy.py --again FILE   # predict anew for what FILE has measured

Each case is a real launch of two ranks: a random Qwen2 of that many million parameters, a launch file, full or LoRA,
short or long rows. Measured is each phase's peak of resident memory as the kernel keeps it (VmHWM, reset as a phase
begins), of the rank with most, as `result.json` has it. The constants of accel_sft/memory/estimate.py were fitted to
the cases of FITTED, so that the others are held out. Other work on the machine changes no number.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import shapes
import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.memory.estimate import PHASES, estimate, totals
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_config, read_shape, stored_bytes

ROOT = Path(__file__).parent.parent
GIB = 2**30
LENGTHS = {
    "short": shapes.Shape(20, (20, 41), (10, 21), 16, 1),
    "long": shapes.Shape(200, (300, 501), (100, 201), 4, 1),
}
"""Rows of a step: 16 rows of about 65 tokens, or 4 rows of about 750."""
WIDTHS = {20: (384, 6), 60: (640, 10), 110: (896, 10), 200: (1024, 14)}
"""Millions of parameters (about) to hidden size and layers, with a vocabulary of 16,384."""
STEPS = 3
LAUNCHES = ("ddp", "z0", "z1", "z2", "z3", "z2_offload", "z3_offload")
FITTED = [
    *((60, name, adapter, "short") for adapter in ("none", "lora") for name in LAUNCHES),
    *((60, name, "none", "long") for name in LAUNCHES[:-1]),
    (20, "z2", "none", "short"),
    (20, "ddp", "none", "long"),
    (20, "z3", "none", "long"),
    (20, "z3_offload", "none", "short"),
    (200, "z2", "lora", "short"),
    (200, "z2", "none", "short"),
    (200, "z3", "lora", "short"),
]
HELD_OUT = [
    (60, "z3_offload", "none", "long"),
    (20, "z1", "none", "long"),
    (20, "z0", "lora", "long"),
    (20, "z2", "lora", "long"),
    (110, "ddp", "lora", "short"),
    (110, "z2_offload", "none", "short"),
    (110, "z3", "none", "short"),
    (200, "ddp", "none", "short"),
    (200, "z0", "none", "short"),
    (200, "z3_offload", "none", "short"),
]
CASES = {"fitted": FITTED, "held-out": HELD_OUT, "all": [*FITTED, *HELD_OUT], "smoke": [(20, "z2", "lora", "short")]}
RANKS = 2


def make_model(folder: Path, millions: int) -> None:
    hidden, layers = WIDTHS[millions]
    if not (folder / "config.json").exists():
        shapes.make_model(folder, hidden=hidden, layers=layers, vocabulary=16384)


def run_case(work: Path, millions: int, launch: str, adapter: str, length: str, ranks: int) -> dict[str, Any]:
    """Launch one run; returns the case, the facts that its memory depends on, and the measured memory of its phases."""
    model, data, out = work / f"model-{millions}", work / f"{length}.json", work / "run"
    make_model(model, millions)
    shapes.write(data, LENGTHS[length])
    shutil.rmtree(out, ignore_errors=True)
    options = {"adapter": adapter, "max_steps": STEPS, "save_every": "1", "eval_every": str(STEPS)}
    options |= {"output_dir": str(out), "tracker": "none", "eval_limit": 4, "max_new_tokens": 4}
    settings = {"model": str(model), "rows": str(data), "batch": LENGTHS[length].batch, "options": options}
    file = ROOT / "accelerate_configs" / f"{launch}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(ranks), "--main_process_port", "0"]
    command += [str(ROOT / "benchmarks/contestants/planned.py"), json.dumps(settings)]
    begun = time.perf_counter()
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    result, record = (json.loads((out / name).read_text()) for name in ("result.json", "run.json"))
    shutil.rmtree(out)
    return {
        "millions": millions,
        "launch": launch,
        "adapter": adapter,
        "length": length,
        "ranks": ranks,
        "precision": record["launch"]["precision"],
        "seconds": time.perf_counter() - begun,
        "batching": result["batching"],
        "forward": result["forward"],
        "start_gib": max(each["process_memory_gib"] for each in result["phases"] if each["phase"] == "data"),
        "measured": {name: peaks["peak_host_memory_gib"] for name, peaks in result["memory_by_phase"].items()},
    }


def predicted(work: Path, case: dict[str, Any]) -> dict[str, float]:
    """The closed form's GiB for each phase, for the largest forward that the run made."""
    folder = work / f"model-{case['millions']}"
    make_model(folder, case["millions"])
    content = read_config(folder)
    file = ROOT / "accelerate_configs" / f"{case['launch']}.yaml"
    launch = "--num_processes", str(case["ranks"]), "--mixed_precision", case["precision"]
    tokens, supervised_tokens, rows, *_ = case["forward"]  # the pixels of images follow
    job = Job(
        shape=read_shape(content, str(folder)),
        launch=launch_of_yaml(file, *launch),
        device="cpu",
        stored_bytes=stored_bytes(content),
        adapter=case["adapter"],
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        rows=rows,
        head=case["batching"]["head"],
        eval_rows=4,
    )
    return {phase: size / GIB for phase, size in totals(estimate(job).host).items()}


def show(cases: list[dict[str, Any]], work: Path) -> None:
    """Print a line for each case (peak, its error, the error of each phase), then mean and worst errors."""
    print("| parameters | launch file | training | rows | predicted | measured | error | by phase |")
    print("|---|---|---|---|---|---|---|---|")
    peaks: dict[str, list[float]] = {"fitted": [], "held out": []}
    phases: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for case in cases:
        found, measured = predicted(work, case), case["measured"]
        error = max(found.values()) / max(measured.values()) - 1
        named = tuple(case[key] for key in ("millions", "launch", "adapter", "length"))
        peaks["fitted" if named in FITTED else "held out"].append(abs(error))
        each = {phase: found[phase] / measured[phase] - 1 for phase in PHASES if phase in measured}
        for phase, share in each.items():
            phases[phase].append(abs(share))
        kind = "full" if case["adapter"] == "none" else case["adapter"]
        cells = [f"{case['millions']} million", case["launch"], kind, case["length"]]
        cells += [f"{max(found.values()):.2f} GiB", f"{max(measured.values()):.2f} GiB", f"{error:+.1%}"]
        print(f"| {' | '.join(cells)} | {' '.join(f'{phase} {share:+.0%}' for phase, share in each.items())} |")
    for kind, errors in peaks.items():
        if errors:
            print(
                f"peak, {kind}: mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}, {len(errors)} cases"
            )
    for phase, errors in phases.items():
        print(f"{phase}: {_summary(errors)}")


def _summary(errors: list[float]) -> str:
    return f"mean error {statistics.mean(errors):.1%}, worst {max(errors):.1%}"


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--cases", choices=[*CASES], default="all")
    parser.add_argument("--again", type=Path, help="Measured cases, one JSON a line.")
    parser.add_argument("--keep", type=Path, help="A file to add measured cases to.")
    args = smoke.parse(parser, cases="smoke")
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if args.again:
            show([json.loads(line) for line in args.again.read_text().splitlines()], work)
            return
        done = []
        for case in CASES[args.cases]:
            done.append(run_case(work, *case, RANKS))
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
        show(done, work)


if __name__ == "__main__":
    main()
