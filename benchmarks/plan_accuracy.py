"""Compares the memory that `accel-sft plan` predicts with three sources, in GiB.

    python benchmarks/plan_accuracy.py [--source NAME] [--cases NAME] [--layers N] [--keep FILE] [--smoke]
    python benchmarks/plan_accuracy.py [--source NAME] --again FILE   # predict again for the cases measured in FILE

`text`: two ranks on a CPU train a random Qwen2 of 20 to 200 million parameters, full or LoRA, on short or long rows.
Each phase's peak of resident memory is measured (the kernel's VmHWM, reset as a phase begins), of the rank with the
highest peak, and read from `result.json`. The constants of accel_sft/memory/estimate.py were fitted to the cases
`fitted`; the other cases are held out. Other work on the machine changes no number.

`images`: the same with one process, a random vision-language model of 15 to 40 million parameters and rows with images;
the vision tower is frozen or trained.

`simulated`: models of published sizes on fake tensors (simulated_memory.py), as one GPU of eight under ZeRO-2. `step`
is the peak without overhead; `forward` is what forward and backward add to the model states. Prediction and simulation
can differ only in `forward`.

`--layers` cuts the models of `simulated`, to save time; prediction and simulation are then of the cut model.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import shapes
import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.precision import assume_precision
from accel_sft.memory.estimate import Estimate, estimate, totals
from accel_sft.memory.job import Job
from accel_sft.memory.model_config import read_config, read_shape, stored_bytes
from accel_sft.memory.states import placed

ROOT = Path(__file__).parent.parent
GIB = 2**30
Case = dict[str, Any]
"""What to launch or simulate; once measured, also `measured` (GiB by phase) and what the prediction needs."""

# --- launched on a CPU ---

STEPS = 3
LENGTHS = {
    "short": shapes.Shape(20, (20, 41), (10, 21), 16, 1),
    "long": shapes.Shape(200, (300, 501), (100, 201), 4, 1),
}
"""Rows of a step: 16 rows of about 65 tokens, or 4 rows of about 750."""
WIDTHS = {20: (384, 6), 60: (640, 10), 110: (896, 10), 200: (1024, 14)}
"""Maps millions of parameters (about) to hidden size and layers; the vocabulary has 16,384 tokens."""
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
ROWS = 4
"""Rows with images in a step, which is one forward."""
PICTURED = [  # family, launch file, adapter, whether the tower is trained, its width and depth, images of a row, size
    ("qwen2_vl", "ddp", "lora", False, 640, 4, 2, (672, 448)),
    ("qwen2_vl", "ddp", "none", True, 512, 6, 1, (448, 448)),
    ("qwen2_5_vl", "z2", "none", False, 640, 4, 2, (448, 448)),
    ("qwen2_5_vl", "z2", "none", True, 384, 8, 1, (672, 448)),
    ("gemma3", "ddp", "lora", False, 512, 6, 2, (448, 448)),
    ("gemma3", "z2", "none", True, 384, 6, 1, (448, 448)),
]
SMALL_PICTURES = ("qwen2_vl", "ddp", "lora", False, 64, 2, 1, (112, 112))
TEXT = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "head_dim": 64, "num_key_value_heads": 4}
TEXT |= {"max_position_embeddings": 4096, "initializer_range": 0.02}


def text_case(group: str, millions: int, launch: str, adapter: str, length: str) -> Case:
    return {"group": group, "millions": millions, "launch": launch, "adapter": adapter, "length": length, "ranks": 2}


def image_case(
    family: str, launch: str, adapter: str, trained: bool, width: int, depth: int, images: int, size: tuple[int, int]
) -> Case:
    case = {"family": family, "launch": launch, "adapter": adapter, "width": width, "depth": depth, "ranks": 1}
    return {**case, "only": "." if trained else None, "images": images, "size": size}


def measured_text(case: Case, folder: Path) -> Case:
    hidden, layers = WIDTHS[case["millions"]]
    shapes.make_model(folder / "model", hidden=hidden, layers=layers, vocabulary=16384)
    shape, rows = LENGTHS[case["length"]], []
    for row in shapes.make_rows(shape):
        turns = zip(("system", "user", "assistant"), row.values(), strict=True)
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    answers = {"save-every": 1, "eval-every": STEPS, "eval-limit": 4, "max-new-tokens": 4}
    return launched(case, folder, rows, {"global-batch-size": shape.batch, **answers})


def measured_images(case: Case, folder: Path) -> Case:
    sys.path.insert(0, str(ROOT / "tests/support"))
    import vision
    from PIL import Image

    width, depth, text = case["width"], case["depth"], TEXT
    eyes = {"hidden_size": width, "num_heads": width // 64, "intermediate_size": width * 4, "patch_size": 14}
    eyes |= {"depth": depth, "initializer_range": 0.02}
    if case["family"] == "gemma3":
        eyes |= {"num_hidden_layers": depth, "num_attention_heads": width // 64, "image_size": case["size"][0]}
    else:
        angles = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
        text = {**TEXT, "rope_parameters": angles}
        own = {"embed_dim": width, "hidden_size": TEXT["hidden_size"], "mlp_ratio": 4}
        later = {"out_hidden_size": TEXT["hidden_size"], "fullatt_block_indexes": [depth - 1]}
        eyes |= own if case["family"] == "qwen2_vl" else later
    vision.make(folder / "model", case["family"], text, eyes)
    rows = []
    for number in range(2 * ROWS):
        paths = [f"{number}-{place}.png" for place in range(case["images"])]
        for place, path in enumerate(paths):
            Image.new("RGB", case["size"], (number * 30, place * 90, 50)).save(folder / path)
        question = f"{'<image>' * len(paths)}What is this?"
        rows.append({"prompt": question, "completion": f"It is red {number}", "images": paths})
    options = {"global-batch-size": ROWS, "micro-batch-size": ROWS, "eval-every": "off", "save-every": "off"}
    return launched(case, folder, rows, {**options, **({"train-only": case["only"]} if case["only"] else {})})


def launched(case: Case, folder: Path, rows: list[dict[str, Any]], options: dict[str, Any]) -> Case:
    """Train the folder's model on these rows; return the case with what the run reports about its memory."""
    data, out = folder / "rows.jsonl", folder / "run"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"model": folder / "model", "train-file": data, "validation-file": data, **options}
    options |= {"adapter": case["adapter"], "max-steps": STEPS, "max-length": 4096, "tracker": "none"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(yaml_of(case))]
    command += ["--num_processes", str(case["ranks"]), "--main_process_port", "0", "-m", "accel_sft", "chat"]
    command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([*command, "--output-dir", str(out)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1500:]}{done.stderr[-3000:]}")
    result, record = (json.loads((out / name).read_text()) for name in ("result.json", "run.json"))
    facts = {"config": read_config(folder / "model"), "precision": record["launch"]["precision"]}
    facts |= {"forward": result["forward"], "head": result["batching"]["head"]}
    measured = {name: peaks["peak_host_memory_gib"] for name, peaks in result["memory_by_phase"].items()}
    return {**case, **facts, "measured": measured}


def predicted_launch(case: Case) -> dict[str, float]:
    """The closed form's GiB of host memory for each phase, for the largest forward that the run made."""
    tokens, supervised_tokens, rows, pixels = case["forward"]
    flags = ("--num_processes", str(case["ranks"]), "--mixed_precision", case["precision"])
    job = Job(
        shape=read_shape(case["config"], "model"),
        launch=launch_of_yaml(yaml_of(case), *flags),
        device="cpu",
        stored_bytes=stored_bytes(case["config"]),
        adapter=case["adapter"],
        train_only=case.get("only"),
        tokens=tokens,
        supervised_tokens=supervised_tokens,
        rows=rows,
        pixels=pixels,
        head=case["head"],
        eval_rows=0 if "family" in case else 4,
        saves="family" not in case,
    )
    return {phase: size / GIB for phase, size in totals(estimate(job).host).items()}


def cells_of_text(case: Case) -> list[str]:
    return [f"{case['millions']} million", case["launch"], training(case), case["length"]]


def cells_of_images(case: Case) -> list[str]:
    tower = f"{case['width']} x {case['depth']}, {'trained' if case['only'] else 'frozen'}"
    images = f"{ROWS * case['images']} of {case['size'][0]}x{case['size'][1]}"
    return [case["family"], case["launch"], training(case), tower, images]


# --- on fake tensors ---


def _qwen(hidden: int, inner: int, layers: int, heads: int, key_value: int, vocabulary: int, tied: bool) -> dict:
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
MODELS: dict[str, dict[str, Any]] = {
    "0.5B": _qwen(896, 4864, 24, 14, 2, 151936, True),
    "1.5B": _qwen(1536, 8960, 28, 12, 2, 151936, True),
    "7B": _qwen(3584, 18944, 28, 28, 4, 152064, False),
    "14B": _qwen(5120, 13824, 48, 40, 8, 152064, False),
    "30B-A3B": _qwen(2048, 6144, 48, 32, 4, 151936, False) | {"model_type": "qwen3_moe", "head_dim": 128, **EXPERTS},
}
"""Models with the shapes of Qwen2.5's and Qwen3's published configurations."""


def simulated_cases(models: Sequence[str] = tuple(MODELS), tokens: Sequence[int] = (1024, 4096, 16384)) -> list[Case]:
    kinds = itertools.product(models, ("none", "lora"), (False, True), tokens)
    names = ("name", "adapter", "gradient_checkpointing", "tokens")
    return [{**dict(zip(names, kind, strict=True)), "launch": "z2", "ranks": 8} for kind in kinds]


def cut(case: Case, layers: int | None) -> Case:
    """The case with its model's config, cut to at most this many layers."""
    config = dict(MODELS[case["name"]])
    return {**case, "model": config | {"num_hidden_layers": min(config["num_hidden_layers"], layers or 10**6)}}


def job_of(case: Case) -> Job:
    launch = launch_of_yaml(yaml_of(case), "--num_processes", str(case["ranks"]))
    return Job(
        shape=read_shape(case["model"], "model"),
        launch=assume_precision(launch, bf16=True),
        device="cuda",
        adapter=case["adapter"],
        gradient_checkpointing=case["gradient_checkpointing"],
        tokens=case["tokens"],
        supervised_tokens=case["tokens"] // 2,
    )


def in_step(job: Job, found: Estimate) -> dict[str, float]:
    """GiB of a step's peak (without the allocator's gaps and memory outside of torch), and of what forwards add."""
    states = placed(job)[0]
    resident = states.weights + states.master + states.moments + states.held + states.buffers + states.gradients
    peak = sum(size for name, size in found.device["step"].items() if name != "overhead")
    return {"step": peak / GIB, "forward": (peak - resident) / GIB}


def measured_simulation(case: Case, folder: Path) -> Case:
    from simulated_memory import forward_backward

    job = job_of(case)
    followed = forward_backward(job, case["model"])
    predicted = estimate(job)
    step = predicted.device["step"] | {"activations": followed.activations, "logits": followed.logits}
    return {**case, "measured": in_step(job, dataclasses.replace(predicted, device={"step": step}))}


def predicted_simulation(case: Case) -> dict[str, float]:
    job = job_of(case)
    return in_step(job, estimate(job))


def cells_of_simulation(case: Case) -> list[str]:
    return [case["name"], training(case), activations(case), str(case["tokens"])]


# --- the table ---


@dataclasses.dataclass(frozen=True)
class Source:
    """How a source's cases are measured (each in its own folder), predicted, and named in the table."""

    heads: str
    cases: dict[str, list[Case]]
    measure: Callable[[Case, Path], Case]
    predict: Callable[[Case], dict[str, float]]
    cells: Callable[[Case], list[str]]


GROUPS = {"fitted": FITTED, "held-out": HELD_OUT, "smoke": [(20, "z2", "lora", "short")]}
SOURCES = {
    "text": Source(
        "parameters | launch file | training | rows",
        {group: [text_case(group, *kind) for kind in kinds] for group, kinds in GROUPS.items()},
        measured_text,
        predicted_launch,
        cells_of_text,
    ),
    "images": Source(
        "family | launch file | training | tower | images",
        {"all": [image_case(*kind) for kind in PICTURED], "smoke": [image_case(*SMALL_PICTURES)]},
        measured_images,
        predicted_launch,
        cells_of_images,
    ),
    "simulated": Source(
        "model | training | activations | tokens",
        {"all": simulated_cases(), "smoke": simulated_cases(["0.5B"], [1024])[:1]},
        measured_simulation,
        predicted_simulation,
        cells_of_simulation,
    ),
}


def yaml_of(case: Case) -> Path:
    return ROOT / "accelerate_configs" / f"{case['launch']}.yaml"


def training(case: Case) -> str:
    return "full" if case["adapter"] == "none" else case["adapter"]


def activations(case: Case) -> str:
    return "recomputed" if case["gradient_checkpointing"] else "kept"


def show(source: Source, cases: Iterator[Case]) -> None:
    """Print a line for each case (peak, its error, the error of each phase), then mean and worst errors."""
    print(f"| {source.heads} | predicted | measured | error | by phase |")
    print("|---" * (source.heads.count("|") + 5) + "|")
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for case in cases:
        predicted, measured = source.predict(case), case["measured"]
        shares = {name: predicted[name] / size - 1 for name, size in measured.items() if name in predicted}
        error = max(predicted.values()) / max(measured.values()) - 1
        for name, share in {f"peak, {case.get('group', 'all')}": error, **shares}.items():
            errors[name].append(abs(share))
        cells = [*source.cells(case), *(f"{max(sizes.values()):.2f} GiB" for sizes in (predicted, measured))]
        phases = " ".join(f"{name} {share:+.0%}" for name, share in shares.items())
        print(f"| {' | '.join(cells)} | {error:+.1%} | {phases} |", flush=True)
    for name, sizes in errors.items():
        print(f"{name}: mean error {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}, {len(sizes)} cases")


def measured(source: Source, cases: list[Case], keep: Path | None) -> Iterator[Case]:
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            found = source.measure(case, Path(folder))
        if keep:
            with keep.open("a") as file:
                file.write(json.dumps(found) + "\n")
        yield found


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--source", choices=[*SOURCES], default="text")
    parser.add_argument("--cases", choices=("fitted", "held-out", "smoke"), help="Cases of `text`; by default all.")
    parser.add_argument("--layers", type=int, help="Cut models on fake tensors to so many layers.")
    parser.add_argument("--again", type=Path, help="A file of measured cases, one JSON a line.")
    parser.add_argument("--keep", type=Path, help="A file to add measured cases to.")
    args = smoke.parse(parser, cases="smoke", layers=2)
    source = SOURCES[args.source]
    if args.again:
        show(source, map(json.loads, args.again.read_text().splitlines()))
        return
    wanted = source.cases.get(args.cases) or [
        case for group, cases in source.cases.items() if group != "smoke" for case in cases
    ]
    wanted = [cut(case, args.layers) if "name" in case else case for case in wanted]
    show(source, measured(source, wanted, args.keep))


if __name__ == "__main__":
    main()
