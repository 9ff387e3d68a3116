"""Tokens per second, model FLOPs utilisation and peak memory on an NVIDIA GPU, per model and ZeRO stage.

    bash benchmarks/gpu.sh [--job NAME ...] [--launch NAME ...] [--peers PYTHON] [--tiny] [--smoke]

Needs no network: models have the published sizes of Qwen2.5 and random weights, rows are random words. All rows of a
job have the same length, and all but 16 tokens of a row are learnt, so nothing is shared, padded or left out of the
head: every trainer computes the same. Each line of the table is measured in its own process, started by `accelerate
launch` with a shipped configuration; if it fails, runs out of memory or takes too long, its line says so. `--peers`
adds TRL, on one process without ZeRO. `--tiny` runs every job with a shrunken model, also on a CPU; `--smoke` runs one
such job. Markdown, then JSON, goes to standard output.

MFU is the share of the card's dense bf16 peak that the model's own FLOPs take, counted by accel_sft/memory/flops.py as
for runs; recomputed activations do not count.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shapes
import smoke
from accel_sft.launch.info import launch_of_yaml
from accel_sft.memory import job as memory
from accel_sft.memory.flops import model_flops, peak_flops
from accel_sft.memory.model_config import read_config, read_shape

HERE = Path(__file__).parent
CONFIGS = HERE.parent / "accelerate_configs"
PROMPT = 16
MODELS = {
    "0.5B": {"hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "intermediate": 4864, "tied": True},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "tied": True},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944, "tied": False},
}
for _name, _model in MODELS.items():
    _model["vocabulary"] = 152_064 if _name == "7B" else 151_936
TINY = {"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 4608}

ALL = ("ddp", "z0", "z1", "z2", "z3", "z2_offload", "z3_offload")


@dataclasses.dataclass(frozen=True)
class Job:
    """One job: `length` tokens per row, `batch` rows per step, and `options` of the trainer."""

    model: str
    length: int
    batch: int
    launches: tuple[str, ...] = ALL
    lora: bool = False
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


ADAPTER = {"r": 8, "lora_alpha": 16}
RECOMPUTED = {"gradient_checkpointing": True}
JOBS = {
    "0.5B full": Job("0.5B", 1024, 16),
    "0.5B LoRA": Job("0.5B", 1024, 16, ("ddp", "z2", "z3"), lora=True),
    "1.5B full": Job("1.5B", 1024, 16),
    "1.5B full, recomputed": Job("1.5B", 1024, 16, ("ddp", "z2", "z3"), options=RECOMPUTED),
    "7B full, recomputed": Job("7B", 1024, 16, ("z2_offload", "z3_offload"), options=RECOMPUTED),
    "7B LoRA": Job("7B", 4096, 4, lora=True),
    "7B LoRA, recomputed": Job("7B", 4096, 4, ("ddp", "z2", "z3"), lora=True, options=RECOMPUTED),
}


def make_model(folder: Path, sizes: dict[str, Any]) -> None:
    """Write a Qwen2 of these sizes with random bf16 weights, and its tokenizer."""
    import torch

    torch.set_default_dtype(torch.bfloat16)
    shapes.make_qwen2(
        folder,
        sizes["vocabulary"],
        device="cuda" if torch.cuda.is_available() else "cpu",  # a GPU draws random numbers faster
        hidden_size=sizes["hidden"],
        intermediate_size=sizes["intermediate"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["kv_heads"],
        max_position_embeddings=32_768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        rms_norm_eps=1e-6,
        tie_word_embeddings=sizes["tied"],
        dtype=torch.bfloat16,
    )


def flops(job: Job, model: Path, answer: int) -> float:
    """Model FLOPs per token of the job with the model in this folder; `answer` tokens of each row are learnt."""
    shape = read_shape(read_config(model), str(model))
    adapter = {"adapter": "lora", "lora_r": ADAPTER["r"]} if job.lora else {}
    of = model_flops(memory.Job(shape=shape, launch=launch_of_yaml(CONFIGS / "ddp.yaml"), device="cuda", **adapter))
    return of.total(job.length, answer, job.length**2 / 2) / job.length


def commands(job: Job, args: argparse.Namespace) -> list[tuple[str, str, list[str], dict[str, Any]]]:
    """(trainer, launch, command, settings) for each line of a job."""
    options = dict(job.options)
    if job.lora:
        adapter = {"adapter": "lora", "lora_r": ADAPTER["r"], "lora_alpha": ADAPTER["lora_alpha"]}
        options = {**options, **adapter}
    found = []
    for launch in job.launches:
        if args.launch and launch not in args.launch:
            continue
        command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--config_file"]
        command += [str(CONFIGS / f"{launch}.yaml"), str(HERE / "contestants" / "ours.py")]
        found.append(("accel_sft", launch, command, {"options": options}))
    if args.peers:
        settings = {"precision": "bf16", "rows_per_forward": max(1, 4096 // job.length), "options": dict(job.options)}
        if job.lora:
            settings["lora"] = ADAPTER
        found.append(("TRL", "one process", [args.peers, str(HERE / "contestants" / "trl_sft.py")], settings))
    return found


def run(command: list[str], settings: dict[str, Any], folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The answer of a line's process; if there is none, `failed` says why, in a few words."""
    answer, log = folder / "answer.json", folder / "log"
    answer.unlink(missing_ok=True)
    settings = {**settings, "warmup_steps": args.warmup_steps, "steps": args.steps, "answer": str(answer)}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(folder)}
    with log.open("wb") as file:
        process = subprocess.Popen([*command, json.dumps(settings)], stdout=file, stderr=file, env=environment)
        try:
            status = process.wait(args.timeout)
        except subprocess.TimeoutExpired:
            process.terminate()  # not SIGKILL: the launcher must be able to end its ranks
            process.wait()
            return {"failed": f"not done in {args.timeout} s"}
    if answer.exists():
        return json.loads(answer.read_text())
    said = log.read_text(errors="replace")
    if args.debug:
        print(said, file=sys.stderr)
    if re.search(r"out of (device )?memory", said, re.IGNORECASE):
        return {"failed": "out of memory"}
    if re.search(r"exitcode *: *-9\b|Signal 9", said):
        return {"failed": "killed (host memory?)"}
    errors = re.findall(r"^(?:\[rank\d+\]: *)?(?:\w+\.)*(\w*(?:Error|Exception)\b.*)", said, re.MULTILINE)
    return {"failed": re.sub(r"[|\s]+", " ", errors[0])[:160] if errors else f"ended with status {status}"}


def card() -> dict[str, Any]:
    """Name, memory in GiB and peak FLOP/s (None if unknown) of the first GPU, found in a separate process."""
    code = "import json, torch; c = torch.cuda; ok = c.is_available(); p = ok and c.get_device_properties(0); "
    code += "print(json.dumps([p.name, p.total_memory / 2**30] if ok else ['no GPU', None]))"
    name, memory = json.loads(subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()[-1])
    return {"name": name, "memory_gib": memory, "peak_flops": peak_flops(name, "bf16")}


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "transformers", "accelerate", "deepspeed", "peft"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "none"
    return found


def line(result: dict[str, Any]) -> str:
    """A row of the table."""

    def shown(key: str, form: str) -> str:
        return form.format(result[key]) if result.get(key) is not None else "-"

    cells = [result["job"], result["trainer"], result["launch"]]
    if "failed" in result:
        return "| " + " | ".join([*cells, result["failed"], *["-"] * 5]) + " |"
    cells += [shown("tokens_per_second", "{:,.0f}")]
    cells += [shown("mfu", "{:.1%}") if result.get("mfu") else "card unknown"]
    cells += [shown(key, "{:.2f}") for key in ("peak_gib", "peak_before_gib", "host_peak_gib")]
    return "| " + " | ".join([*cells, shown("loss", "{:.4f}")]) + " |"


def measure(args: argparse.Namespace, folder: Path, gpu: dict[str, Any]) -> list[dict[str, Any]]:
    """The result of every line of every job; each is printed as soon as it is known."""
    results = []
    for model in MODELS:
        jobs = {name: job for name, job in JOBS.items() if job.model == model and (not args.job or name in args.job)}
        if not jobs:
            continue
        sizes = {**MODELS[model], **(TINY if args.tiny else {})}
        weights = folder / "model"
        # in a separate process, so that nothing is left on the card
        made = [sys.executable, __file__, "--make-model", json.dumps(sizes), str(weights)]
        subprocess.run(made, check=True, stdout=sys.stderr)
        for name, job in jobs.items():
            job = dataclasses.replace(job, length=64) if args.tiny else job
            answer = job.length - PROMPT
            shape = shapes.Shape(0, (PROMPT, PROMPT + 1), (answer, answer + 1), job.batch, 0)
            tokens, _ = shapes.write(folder / "rows.json", shape)
            for trainer, launch, command, settings in commands(job, args):
                common = {"model": str(weights), "rows": str(folder / "rows.json"), "batch": job.batch}
                result = {"job": name, "trainer": trainer, "launch": launch, "tokens_per_step": tokens}
                result |= run(command, {**common, **settings}, folder, args)
                if "failed" not in result:
                    result["tokens_per_second"] = args.steps * tokens / result["seconds"]
                    if gpu["peak_flops"]:
                        result["mfu"] = result["tokens_per_second"] * flops(job, weights, answer) / gpu["peak_flops"]
                results.append(result)
                print(line(result), flush=True)
        shutil.rmtree(weights)
    return results


def main() -> None:
    parser = smoke.parser(__doc__)
    parser.add_argument("--job", action="append", choices=JOBS)
    parser.add_argument("--launch", action="append", choices=ALL)
    parser.add_argument("--peers", metavar="PYTHON", help="Python of an environment with benchmarks/peers.txt.")
    parser.add_argument("--warmup-steps", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="Measured steps, after the warm-up.")
    parser.add_argument("--timeout", type=int, default=1200, help="Seconds that a line may take.")
    parser.add_argument("--folder", help="Folder for weights (up to 16 GB); default: a temporary one.")
    parser.add_argument("--tiny", action="store_true", help="Shrunken models and rows, to try it all out.")
    parser.add_argument("--debug", action="store_true", help="Show the output of a process that fails.")
    parser.add_argument("--make-model", nargs=2, help=argparse.SUPPRESS)
    args = smoke.parse(parser, tiny=True, job=["0.5B full"], launch=["ddp"], warmup_steps=1, steps=1)
    if args.make_model:
        make_model(Path(args.make_model[1]), json.loads(args.make_model[0]))
        return
    gpu = card()
    if gpu["name"] == "no GPU" and not args.tiny:
        raise SystemExit("no NVIDIA GPU is visible to torch here; --tiny runs on a CPU")
    about = {"date": datetime.date.today().isoformat(), "tiny": args.tiny, "card": gpu, "versions": versions()}
    peak = f"{gpu['peak_flops'] / 1e12:.0f} TFLOP/s" if gpu["peak_flops"] else "peak FLOP/s unknown, MFU left out"
    print(f"{about['date']}, {gpu['name']} ({peak}), {', '.join(' '.join(v) for v in about['versions'].items())}")
    print("MFU: model FLOPs as accel_sft/memory/flops.py counts them; recomputation does not count.\n")
    heads = ["job", "trainer", "launch", "tokens/s", "MFU"]
    heads += ["peak GiB", "peak GiB of start", "peak host GiB", "first loss"]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads), flush=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        results = measure(args, Path(name), gpu)
    print("\n```json\n" + json.dumps({**about, "results": results}, indent=1) + "\n```")


if __name__ == "__main__":
    main()
