"""The checks of tests/gpu, in the order in which they are worth running."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from launches import Failed, Machine, Run, difference

SHORT = ("--max-steps", "20", "--eval-every", "off", "--train-examples", "2000", "--validation-examples", "8")
LAUNCHES = ("z0", "z1", "z2", "z2_offload", "z3", "z3_offload", "z3_nvme", "fsdp2", "fsdp2_offload")
"""Every shipped launch file that runs on one GPU; each is held against ddp."""


@dataclass(frozen=True)
class Check:
    """A claim, how many seconds it usually takes, and what shows it: `run` returns what was measured, or raises."""

    name: str
    claim: str
    seconds: int
    run: Callable[[Machine], str]


CHECKS: list[Check] = []


def check(name: str, claim: str, seconds: int) -> Callable:
    def add(run: Callable[[Machine], str]) -> Callable[[Machine], str]:
        CHECKS.append(Check(name, claim, seconds, run))
        return run

    return add


def agree(reference: Run, others: list[Run], within: float) -> str:
    """The differences, if all are small enough; Failed names the launches that failed and those that differ."""
    said, bad = [], []
    for run in others:
        try:
            apart = difference(run.expect(), reference)
        except Failed as failure:
            bad.append(str(failure))
        else:
            (said if apart <= within else bad).append(f"{run.folder.name} {apart:.1e}")
    if bad:
        raise Failed("; ".join(bad + said))
    return "largest relative difference of a loss: " + ", ".join(said)


@check("ddp", "the README's job under ddp learns its task", 90)
def learns(machine: Machine) -> str:
    options = ("--max-steps", "4", *SHORT[4:]) if machine.tiny else ()
    result = machine.train("ddp", "ddp", *options).expect().result
    after, memory = result["after"]["accuracy"], result["peak_device_memory_gib"]
    if not machine.tiny and (after < 0.9 or not memory):
        raise Failed(f"accuracy {after}, peak device memory {memory} GiB")
    return f"accuracy {after}, {result['train_seconds']:.0f} s, peak device memory {memory} GiB"


@check("launch files", "every launch file draws ddp's curve in float32, to 2e-5", 240)
def launch_files(machine: Machine) -> str:
    float32 = ("--mixed_precision", "no")
    reference = machine.train("ddp float32", "ddp", *SHORT, launcher=float32).expect()
    names = ("z2", "z3") if machine.tiny else LAUNCHES
    return agree(reference, [machine.train(f"{name} float32", name, *SHORT, launcher=float32) for name in names], 2e-5)


@check("bf16", "shared, packed and padded rows draw one curve in bf16 under ddp, z2 and z3, to 2e-2", 180)
def bf16(machine: Machine) -> str:
    launcher, names = ("--mixed_precision", "bf16"), ("ddp",) if machine.tiny else ("ddp", "z2", "z3", "fsdp2")
    reference = machine.train("bf16", "ddp", *SHORT, "--batching", "padded", launcher=launcher).expect()
    runs = []
    for name in names:
        for batching in ("shared", "packed", "padded"):
            runs.append(machine.train(f"{name} {batching}", name, *SHORT, "--batching", batching, launcher=launcher))
    return agree(reference, runs, 2e-2)


@check("0.5B", "a 0.5B model trains whole under ddp, z2 and z3", 300)
def half_a_billion(machine: Machine) -> str:
    launches = ("--launch", "ddp", "--launch", "z2", "--launch", "z3")
    return machine.benchmark("--job", "0.5B full", *launches, seconds=120)


@check("1.5B", "a 1.5B model under z0 and z2 gets past step 2, when Adam's moments are there", 240)
def one_and_a_half_billion(machine: Machine) -> str:
    return machine.benchmark("--job", "1.5B full", "--launch", "z0", "--launch", "z2", seconds=200)


@check("7B LoRA", "an adapter on a 7B model trains under ddp", 240)
def seven_billion(machine: Machine) -> str:
    return machine.benchmark("--job", "7B LoRA", "--launch", "ddp", seconds=240)


@check("offload without nvcc", "z2_offload runs where only a C++ compiler is", 120)
def without_toolkit(machine: Machine) -> str:
    folders = [each for each in os.environ["PATH"].split(":") if not os.path.exists(os.path.join(each, "nvcc"))]
    hidden = {"PATH": ":".join(folders), "CUDA_HOME": "", "CUDA_PATH": ""}
    run = machine.train("no toolkit", "z2_offload", "--max-steps", "3", *SHORT[2:], environment=hidden).expect()
    return f"losses {', '.join(f'{loss:.4f}' for loss in run.losses)}"


@check("same bits", "with --deterministic a repeated and a resumed run end with the same weights", 150)
def same_bits(machine: Machine) -> str:
    job = ("--max-steps", "12", *SHORT[2:], "--save-every", "4", "--keep-checkpoints", "9")
    said, bad = [], []
    for name, options in (("default", ()), ("deterministic", ("--deterministic",))):
        whole, again = (machine.train(f"{name} {number}", "ddp", *job, *options).expect() for number in (1, 2))
        resumed = machine.folder / f"{name} resumed"
        shutil.copytree(whole.folder, resumed)
        shutil.rmtree(resumed / "final")
        for step in ("step-000008", "step-000012"):
            shutil.rmtree(resumed / "checkpoints" / step)
        (resumed / "result.json").write_text('{"status": "running"}')
        went_on = machine.train(resumed.name, "ddp", *job, *options, "--resume", "auto").expect()
        same = [other.weights == whole.weights for other in (again, went_on)]
        words = (
            f"{name}: repeated {'the same' if same[0] else 'other'} bits, resumed {'the same' if same[1] else 'other'}"
        )
        (bad if options and not all(same) else said).append(words)
    if bad:
        raise Failed("; ".join(bad + said))
    return "; ".join(said)


@check("fp16", "half precision with a loss scale trains", 60)
def fp16(machine: Machine) -> str:
    if machine.tiny:
        return "a GPU's"
    names = ("ddp", "z2")
    runs = [machine.train(f"{name} fp16", name, *SHORT, launcher=("--mixed_precision", "fp16")) for name in names]
    return "; ".join(f"{run.folder.name}: last loss {run.expect().losses[-1]:.3f}" for run in runs)


@check("attention", "flex_attention, flash_attention_2 where it is installed, and --compile draw sdpa's curve", 240)
def attention(machine: Machine) -> str:
    launcher = ("--mixed_precision", "bf16")
    reference = machine.train("sdpa", "ddp", *SHORT, launcher=launcher).expect()
    kinds = [] if machine.tiny else ["flex_attention"]
    if not machine.tiny and _installed("flash_attn"):
        kinds.append("flash_attention_2")
    runs = [machine.train(kind, "ddp", *SHORT, "--attn-implementation", kind, launcher=launcher) for kind in kinds]
    runs.append(machine.train("compile", "ddp", *SHORT, "--compile", launcher=launcher))
    return agree(reference, runs, 2e-2)


@check("liger", "--use-liger-kernel draws the curve without it, under ddp and z3; how much faster", 120)
def liger_kernels(machine: Machine) -> str:
    if machine.tiny:
        return "a GPU's"
    if not _installed("liger_kernel"):
        raise Failed("liger-kernel is not installed: put its wheel into the folder of WHEELS")
    launcher = ("--mixed_precision", "bf16")
    plain = machine.train("no liger", "ddp", *SHORT, launcher=launcher).expect()
    runs = [
        machine.train(f"{name} liger", name, *SHORT, "--use-liger-kernel", launcher=launcher) for name in ("ddp", "z3")
    ]
    said = agree(plain, runs, 2e-2)
    speeds = [run.result["train_seconds"] for run in (plain, runs[0])]
    return f"{said}; {speeds[0] / speeds[1]:.2f} times as fast under ddp"


def _installed(module: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(module) is not None


@check("signals", "after SIGTERM, and after SIGKILL under --max_restarts, a run ends as if undisturbed", 180)
def signals(machine: Machine) -> str:
    job = ("--max-steps", "40", *SHORT[2:], "--save-every", "4")
    whole = machine.train("undisturbed", "ddp", *job).expect()
    machine.interrupted("stopped", "ddp", *job, whom="launcher")
    stopped = machine.train("stopped", "ddp", *job, "--resume", "auto")
    restart = ("--max_restarts", "1")
    killed = machine.interrupted("killed", "ddp", *job, "--resume", "auto", whom="rank", launcher=restart)
    # a GPU's kernels add up in any order unless --deterministic: the curve is held, not the bits
    return agree(whole, [stopped, killed], 1e-3)


@check("watching", "a run says where its time went, and its GPU's use and energy are counted", 60)
def watching(machine: Machine) -> str:
    run = machine.train("watched", "ddp", *SHORT, "--profile").expect()
    spent = run.result["time_spent"]
    told = next((line for line in run.output.splitlines() if line.startswith("on rank 0 a step took ")), "")
    if not told or abs(sum(spent["parts"].values()) - spent["seconds"]) > 1e-6 * spent["seconds"]:
        raise Failed(f"{told!r}: {spent}")
    if machine.tiny:
        return told
    (rank,), energy = run.result["system"], run.result.get("energy")
    if "gpu_percent" not in rank["mean"] or not energy or energy["joules"] <= 0:
        raise Failed(f"energy {energy}, readings {rank['mean']}")
    return f"{told}; use {rank['mean']['gpu_percent']:.0f}%, {energy['joules']:.0f} J"
