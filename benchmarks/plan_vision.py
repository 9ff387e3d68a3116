"""Host memory that `accel-sft plan` predicts for data with images, against what training takes on a CPU.

    python benchmarks/plan_vision.py [--cases N ...] [--keep FILE] [--smoke]
    python benchmarks/plan_vision.py --again FILE   # predict anew for what FILE has measured

Each case is a real launch of one process in bf16: a random vision-language model of 15 to 40 million parameters, rows
with one or two images, the vision tower frozen or trained. Measured is the peak of resident memory as the kernel keeps
it (VmHWM); predicted is the closed form's for the largest forward that the run made.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.estimate import estimate, totals
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_config, read_shape, stored_bytes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/support"))

import vision  # noqa: E402
from PIL import Image  # noqa: E402

GIB = 2**30
ROWS = 4
"""Rows of a step, which are one forward."""
CASES: list[dict[str, Any]] = [
    {
        "family": "qwen2_vl",
        "launch": "ddp",
        "adapter": "lora",
        "width": 640,
        "depth": 4,
        "size": (672, 448),
        "images": 2,
    },
    {"family": "qwen2_vl", "launch": "ddp", "width": 512, "depth": 6, "size": (448, 448), "images": 1, "only": "."},
    {"family": "qwen2_5_vl", "launch": "z2", "width": 640, "depth": 4, "size": (448, 448), "images": 2},
    {"family": "qwen2_5_vl", "launch": "z2", "width": 384, "depth": 8, "size": (672, 448), "images": 1, "only": "."},
    {"family": "gemma3", "launch": "ddp", "adapter": "lora", "width": 512, "depth": 6, "size": (448, 448), "images": 2},
    {"family": "gemma3", "launch": "z2", "width": 384, "depth": 6, "size": (448, 448), "images": 1, "only": "."},
]
SMOKE = {"family": "qwen2_vl", "launch": "ddp", "adapter": "lora", "width": 64, "depth": 2, "size": (112, 112)}
TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64, "num_key_value_heads": 4}
TEXT |= {"max_position_embeddings": 4096, "initializer_range": 0.02}


def make(work: Path, case: dict[str, Any]) -> tuple[Path, Path]:
    """The folder of a case's model, and its rows, twice as many as a step has."""
    model, data, width = work / "model", work / "rows.jsonl", case["width"]
    gemma = case["family"] == "gemma3"
    eyes = {"hidden_size": width, "num_heads": width // 64, "intermediate_size": width * 4, "patch_size": 14}
    eyes |= {"depth": case["depth"], "initializer_range": 0.02}
    if gemma:
        eyes |= {"num_hidden_layers": case["depth"], "num_attention_heads": width // 64, "image_size": case["size"][0]}
    elif case["family"] == "qwen2_vl":
        eyes |= {"embed_dim": width, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 4}
    else:
        eyes |= {"out_hidden_size": TEXT["hidden_size"], "fullatt_block_indexes": [case["depth"] - 1]}
    angles = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    vision.make(model, case["family"], TEXT if gemma else {**TEXT, "rope_parameters": angles}, eyes)
    rows = []
    for number in range(2 * ROWS):
        paths = []
        for place in range(case.get("images", 1)):
            paths.append(f"{number}-{place}.png")
            Image.new("RGB", case["size"], (number * 30, place * 90, 50)).save(work / paths[-1])
        row = {"prompt": f"{'<image>' * len(paths)}What is this?", "completion": f"It is red {number}", "images": paths}
        rows.append(json.dumps(row) + "\n")
    data.write_text("".join(rows))
    return model, data


def run_case(work: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Launch one run; returns the case, its model's config.json, its largest forward and the memory of its phases."""
    model, data = make(work, case)
    options = {"model": model, "train-file": data, "validation-file": data, "adapter": case.get("adapter", "none")}
    options |= {"max-steps": 3, "global-batch-size": ROWS, "micro-batch-size": ROWS, "eval-every": "off"}
    options |= {"save-every": "off", "tracker": "none", "max-length": 4096, "output-dir": work / "run"}
    options |= {"train-only": case["only"]} if "only" in case else {}
    file = ROOT / "accelerate_configs" / f"{case['launch']}.yaml"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file), "--num_processes", "1"]
    command += ["--main_process_port", "0", "-m", "accel_sft", "chat"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, cwd=work, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2500:]}{done.stderr[-3000:]}")
    result = json.loads((work / "run/result.json").read_text())
    measured = {name: peaks["peak_host_memory_gib"] for name, peaks in result["memory_by_phase"].items()}
    about = {"config": read_config(model), "parameters": read_shape(read_config(model), "model").other}
    return {**case, **about, "head": result["batching"]["head"], "forward": result["forward"], "measured": measured}


def predicted(case: dict[str, Any]) -> dict[str, float]:
    """The closed form's GiB for each phase, for the largest forward that the run made."""
    content, name = case["config"], case["family"]
    tokens, supervised_tokens, rows, pixels = case["forward"]
    file = ROOT / "accelerate_configs" / f"{case['launch']}.yaml"
    job = Job(
        shape=read_shape(content, name),
        launch=assume_precision(launch_of_yaml(file, "--num_processes", "1"), bf16=True),
        device="cpu",
        stored_bytes=stored_bytes(content),
        adapter=case.get("adapter", "none"),
        train_only=case.get("only"),
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        rows=rows,
        pixels=pixels,
        head=case["head"],
        eval_rows=0,
        saves=False,
    )
    return {phase: size / GIB for phase, size in totals(estimate(job).host).items()}


def show(cases: list[dict[str, Any]]) -> None:
    """Print a line for each case, then mean and worst errors of their peaks."""
    print("| family | launch file | training | tower | images | predicted | measured | error | by phase |")
    print("|---|---|---|---|---|---|---|---|---|")
    errors = []
    for case in cases:
        found, measured = predicted(case), case["measured"]
        errors.append(max(found.values()) / max(measured.values()) - 1)
        tower = f"{case['width']} x {case['depth']}, {'trained' if 'only' in case else 'frozen'}"
        images = f"{ROWS * case.get('images', 1)} of {case['size'][0]}x{case['size'][1]}"
        cells = [case["family"], case["launch"], case.get("adapter", "full"), tower, images]
        cells += [f"{max(each.values()):.2f} GiB" for each in (found, measured)]
        phases = (f"{name} {found[name] / size - 1:+.0%}" for name, size in measured.items() if name in found)
        print(f"| {' | '.join(cells)} | {errors[-1]:+.1%} | {' '.join(phases)} |")
    sizes = [abs(error) for error in errors]
    print(f"peak: mean error {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}, {len(sizes)} cases")


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--cases", type=int, nargs="*", default=[*range(len(CASES))])
    parser.add_argument("--again", type=Path, help="Measured cases, one JSON a line.")
    parser.add_argument("--keep", type=Path, help="A file to add measured cases to.")
    args = smoke.parse(parser, cases=[])
    if args.again:
        show([json.loads(line) for line in args.again.read_text().splitlines()])
        return
    done = []
    for case in [CASES[number] for number in args.cases] or [SMOKE]:
        with tempfile.TemporaryDirectory() as work:
            done.append(run_case(Path(work), case))
        if args.keep:
            with args.keep.open("a") as file:
                file.write(json.dumps(done[-1]) + "\n")
    show(done)


if __name__ == "__main__":
    main()
