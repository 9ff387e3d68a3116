"""Host memory per rank that `accel-sft plan` predicts, against what training takes on a CPU, by phase.

    python benchmarks/plan_accuracy.py [--sizes 20 60 200] [--ranks 2] [--cases z0 z2 ...] [--smoke]
    python benchmarks/plan_accuracy.py --again FILE   # predict again for what FILE has measured

Each case is a real launch of the command line: a random Qwen2 of that many million parameters, a launch file, full or
LoRA, short or long rows. Measured is each phase's peak of resident memory as the kernel keeps it (VmHWM, reset as a
phase begins), of the rank with most: what `result.json` records as `memory_by_phase`. Nothing is fitted here; the
constants of the prediction are in accel_sft/planning/.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import shapes

ROOT = Path(__file__).parent.parent
GIB = 2**30
LENGTHS = {
    "short": shapes.Shape(20, (20, 41), (10, 21), 16, 1),
    "long": shapes.Shape(200, (300, 501), (100, 201), 4, 1),
}
"""Rows of a step: 16 of about 65 tokens, 4 of about 750."""
WIDTHS = {20: (384, 6), 60: (640, 10), 110: (896, 10), 200: (1024, 14)}
"""Hidden size and layers of a model of about so many million parameters, with a vocabulary of 8,192 or so."""
STEPS = 3


def make_model(folder: Path, millions: int) -> None:
    hidden, layers = WIDTHS[millions]
    if not (folder / "config.json").exists():
        shapes.make_model(folder, hidden=hidden, layers=layers, vocabulary=16384)


def run_case(work: Path, millions: int, launch: str, adapter: str, length: str, ranks: int) -> dict[str, Any]:
    """Launch one run; what its phases took, and what decides it."""
    model, data, out = work / f"model-{millions}", work / f"{length}.json", work / "run"
    make_model(model, millions)
    shapes.write(data, LENGTHS[length])
    shutil.rmtree(out, ignore_errors=True)
    options = {"adapter": adapter, "max_steps": STEPS, "save_every": str(STEPS), "eval_every": str(STEPS)}
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
    result = json.loads((out / "result.json").read_text())
    shutil.rmtree(out)
    return {
        "millions": millions,
        "launch": launch,
        "adapter": adapter,
        "length": length,
        "ranks": ranks,
        "seconds": time.perf_counter() - begun,
        "batching": result["batching"],
        "start_gib": max(each["process_memory_gib"] for each in result["phases"] if each["phase"] == "data"),
        "measured": {name: peaks["peak_host_memory_gib"] for name, peaks in result["memory_by_phase"].items()},
    }
