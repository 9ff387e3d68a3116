"""Checks of tests/gpu on models of published sizes: their speed, their memory beside what was predicted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from launches import ROOT, Failed, Machine, Run
from suite import BF16, check, hold, needs_gpu, needs_operators, seen, watched

DEVICE_SHARE, HOST_SHARE, HOST_MORE = 0.15, 0.25, 1.0
"""Largest shares by which measured memory may differ from what was predicted; host memory may be this many GiB more."""
SCALING = 0.7
"""Least speed on all GPUs, as a share of the speed of one times their number."""


def trained(machine: Machine, size: str, yaml: str, *options: str, processes: int = 0) -> Run:
    """A run of a model of this size (benchmarks/gpu.py) with random weights on rows of 1,024 tokens, 16 rows a
    step and process; the same one is run once. It is `expect`ed to have ended well."""
    processes = processes or machine.processes
    name = " ".join([size, yaml, f"on {processes}", *(option.removeprefix("--") for option in options)])

    def run() -> Run:
        model, rows = machine.once(size, lambda: _model(machine, size)), machine.once("rows", lambda: _rows(machine))
        job = ("--model", str(model), "--train-file", str(rows))
        job += ("--max-steps", "6" if machine.tiny else "12", "--eval-every", "off", "--save-every", "off")
        job += ("--global-batch-size", str((2 if machine.tiny else 16) * processes), "--max-length", "2048", *options)
        return machine.train(
            name, yaml, *job, launcher=BF16, processes=processes, **watched(machine, name, "Watched")
        ).expect()

    return machine.once(name, run)


def _model(machine: Machine, size: str) -> Path:
    """The folder of a model of this size, made in a process of its own: this one holds no memory on a card."""
    sys.path.append(str(ROOT / "benchmarks"))
    import gpu

    sizes = {**gpu.MODELS[size], **(gpu.TINY if machine.tiny else {})}
    folder, script = machine.folder / f"model {size}", str(ROOT / "benchmarks" / "gpu.py")
    command = [sys.executable, script, "--make-model", json.dumps(sizes), str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, env=machine.environment)
    if made.returncode:
        raise Failed(f"the {size} model was not made: {made.stderr[-300:]}")
    return folder


def _rows(machine: Machine) -> Path:
    """A file of chats of 1,024 tokens of random words, 16 of them the question's; 64 tokens with --tiny."""
    sys.path.append(str(ROOT / "benchmarks"))
    import shapes

    answer = (64 if machine.tiny else 1024) - 16
    made = shapes.make_rows(shapes.Shape(0, (16, 17), (answer, answer + 1), 64 if machine.tiny else 512, 0))
    turns = (
        [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in made
    )
    file = machine.folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    return file


def speed(run: Run) -> str:
    """Tokens per second in the median of the later half of the steps, and MFU where the run reports it."""
    sentence = f"{run.folder.name}: {tokens_per_second(run):,.0f} tokens/s"
    mfu = run.result.get("mfu")
    return sentence + (f", MFU {mfu:.1%}" if isinstance(mfu, float) else "")


def tokens_per_second(run: Run) -> float:
    return statistics.median(line["tokens_per_second"] for line in run.lines[len(run.lines) // 2 :])


def memory(machine: Machine, run: Run) -> tuple[str, bool]:
    """The measured beside the predicted peaks of a run's steps in GiB, and whether the prediction is good enough."""
    results, good = [], True
    for place, phases in run.result["memory"].items():
        steps = [phases[name] for name in ("first_step", "step") if name in phases]
        predicted, measured = (max(step[key] for step in steps) for key in ("predicted_gib", "measured_gib"))
        results.append(f"{place} {measured:.2f} GiB, predicted {predicted:.2f}")
        if place == "device":
            good = good and abs(measured / predicted - 1) <= DEVICE_SHARE
        else:
            good = good and measured <= (1 + HOST_SHARE) * predicted + HOST_MORE
    if not results or (machine.devices and len(results) < 2):
        raise Failed(f"{run.folder.name}: its result.json compares no memory with a prediction")
    return f"{run.folder.name}: {', '.join(results)}", good or machine.tiny


def remembered(machine: Machine, runs: list[Run]) -> str:
    """The memory and the speed of runs; Failed if the memory of one is not as predicted."""
    lines, good = zip(*(memory(machine, run) for run in runs), strict=True)
    speeds = (speed(run).partition(": ")[2] for run in runs)
    return hold(all(good), "; ".join(f"{line}, {measured}" for line, measured in zip(lines, speeds, strict=True)))


@check("0.5B", value=12, seconds=200)
def half_a_billion(machine: Machine) -> str:
    """A 0.5B model takes the predicted memory under ddp, z2, z3 and fsdp2, within 15% on the device."""
    return remembered(machine, [trained(machine, "0.5B", yaml) for yaml in ("ddp", "z2", "z3", "fsdp2")])


@check(
    "speed",
    f"all GPUs together train a 0.5B model at least {SCALING} times their number as fast as one",
    value=5,
    seconds=90,
    least=2,
)
def scaling(machine: Machine) -> str:
    one, all_of_them = trained(machine, "0.5B", "ddp", processes=1), trained(machine, "0.5B", "ddp")
    share = tokens_per_second(all_of_them) / tokens_per_second(one) / machine.processes
    sentence = f"{speed(one)}; {speed(all_of_them)}; {share:.0%} of {machine.processes} times one"
    return hold(share >= SCALING or machine.tiny, sentence)


@check("offloaded", value=4, seconds=150)
def offloaded(machine: Machine) -> str:
    """A 0.5B model takes the predicted host memory under z2_offload and fsdp2_offload; how much is pinned."""
    needs_gpu(machine)
    needs_operators(machine, "cpu_adam")
    runs = [trained(machine, "0.5B", yaml) for yaml in ("z2_offload", "fsdp2_offload")]
    pinned = [f"{run.folder.name}: pinned on rank 0 {_pinned(seen(run))}" for run in runs]
    return f"{remembered(machine, runs)}; {'; '.join(pinned)}"


def _pinned(rank: dict) -> str:
    """Bytes that were asked for and that torch's host allocator took, which may round up."""
    stats = rank.get("pinned")
    return (
        ", ".join(f"{key} {size / 2**30:.2f} GiB" for key, size in stats.items())
        if stats
        else "is not counted by this torch"
    )


@check("adapters", value=3, seconds=50)
def adapters(machine: Machine) -> str:
    """An adapter's matrices are given bf16, without a cast to float32, under ddp."""
    run = trained(machine, "0.5B", "ddp", "--adapter", "lora")
    found = seen(run)
    sentence = f"given {', '.join(found['adapters_given'])}; {memory(machine, run)[0]}; {speed(run)}"
    return hold(found["adapters_given"] == ["torch.bfloat16"], sentence)


@check("1.5B", value=2, seconds=180)
def one_and_a_half_billion(machine: Machine) -> str:
    """A 1.5B model gets past step 2, when Adam's moments are there, under z0 and z2."""
    return remembered(machine, [trained(machine, "1.5B", yaml) for yaml in ("z0", "z2")])


@check("7B LoRA", value=3, seconds=300)
def seven_billion(machine: Machine) -> str:
    """An adapter on a 7B model trains under ddp, and whole weights are shared out under z3."""
    return remembered(machine, [trained(machine, "7B", yaml, "--adapter", "lora") for yaml in ("ddp", "z3")])
