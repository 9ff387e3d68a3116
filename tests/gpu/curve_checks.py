"""Checks of tests/gpu on the mathematics: every launch, layout, precision and kernel draws the curve of one process."""

from __future__ import annotations

import os
import shutil

from launches import Machine, NotTried, Run
from suite import BF16, FLOAT32, agree, check, ddp_float32, hold, needs_gpu, needs_module, needs_operators

LAUNCHES = {  # value, expected seconds: DeepSpeed compiles an operator for those that offload, once on a machine
    "ddp": (6, 35),
    "z0": (1, 30),
    "z1": (2, 30),
    "z2": (6, 35),
    "z3": (6, 40),
    "fsdp2": (6, 40),
    "fsdp2_offload": (2, 45),
    "hsdp": (3, 40),
    "z3_sp": (3, 45),
    "tp": (3, 40),
    "z2_offload": (5, 150),
    "z3_offload": (1, 60),
    "z3_twin_flow": (1, 50),
    "z3_nvme": (1, 180),
}
OPERATORS = dict.fromkeys(("z2_offload", "z3_offload", "z3_twin_flow"), ("cpu_adam",))
OPERATORS["z3_nvme"] = ("cpu_adam", "async_io")


@check("ddp", value=20, seconds=90)
def learns(machine: Machine) -> str:
    """The README's job under ddp learns its task."""
    options = machine.job(4)[:2] + machine.job(4)[4:] if machine.tiny else ()
    result = machine.train("ddp", "ddp", *options).expect().result
    after, memory = result["after"]["accuracy"], result["peak_device_memory_gib"]
    if machine.tiny:
        return "its job ran for a few steps, too few to learn it"
    measured = f"accuracy {after}, {result['train_seconds']:.0f} s, peak device memory {memory} GiB"
    return hold(after >= 0.9 and bool(memory), measured)


def draws_the_curve(machine: Machine, yaml: str) -> str:
    """Whether this launch file, on all processes, draws in float32 the curve of ddp on one."""
    if yaml == "hsdp" and (machine.processes < 4 or machine.processes % 2):
        raise NotTried(f"two groups of two or more: needs 4 GPUs, or 6, or 8; --gpus is {machine.processes}")
    if yaml == "z3_sp" and machine.processes % 2:
        raise NotTried(f"two ranks share a row: needs an even number of GPUs; --gpus is {machine.processes}")
    if yaml == "tp" and machine.processes not in (2, 4):
        raise NotTried(f"the model's 4 heads are cut over 2 or 4 GPUs; --gpus is {machine.processes}")
    needs_operators(machine, *OPERATORS.get(yaml, ()))
    size = ("--parallelism_config_tp_size", str(machine.processes)) if yaml == "tp" else ()
    run = machine.train(f"launch {yaml}", yaml, *machine.short(), launcher=(*FLOAT32, *size))
    return agree(ddp_float32(machine), [run], 2e-5)


for _yaml, (_value, _seconds) in LAUNCHES.items():
    check(
        f"launch {_yaml}",
        f"{_yaml} on all processes draws the curve of ddp on one in float32, to 2e-5",
        value=_value,
        seconds=_seconds,
        least=2 if _yaml in ("ddp", "hsdp", "z3_sp", "tp") else 1,
    )(lambda machine, yaml=_yaml: draws_the_curve(machine, yaml))


def one_curve_in_bf16(machine: Machine, yaml: str) -> str:
    def padded() -> Run:
        options = machine.short("--batching", "padded")
        return machine.train("bf16", "ddp", *options, launcher=BF16, processes=1).expect()

    layouts = ("shared", "packed", "padded")
    runs = [
        machine.train(f"bf16 {yaml} {name}", yaml, *machine.short("--batching", name), launcher=BF16)
        for name in layouts
    ]
    return agree(machine.once("bf16", padded), runs, 2e-2)


for _yaml, _value in {"ddp": 5, "z2": 3, "z3": 3, "fsdp2": 3}.items():
    check(
        f"bf16 {_yaml}",
        f"shared, packed and padded rows draw one curve in bf16 under {_yaml}, to 2e-2",
        value=_value,
        seconds=90,
    )(lambda machine, yaml=_yaml: one_curve_in_bf16(machine, yaml))


@check("same bits", value=4, seconds=150)
def same_bits(machine: Machine) -> str:
    """With --deterministic a repeated and a resumed run end with the same weights."""
    job = machine.job(
        6 if machine.tiny else 12, "--save-every", "2" if machine.tiny else "4", "--keep-checkpoints", "9"
    )
    results, bad = [], []
    for name, options in (("default", ()), ("deterministic", ("--deterministic",))):
        whole, again = (machine.train(f"{name} {number}", "ddp", *job, *options).expect() for number in (1, 2))
        resumed = machine.folder / f"{name} resumed"
        shutil.copytree(whole.folder, resumed)
        shutil.rmtree(resumed / "final")
        for newer in sorted((resumed / "checkpoints").glob("step-*"))[1:]:
            shutil.rmtree(newer)
        (resumed / "result.json").write_text('{"status": "running"}')
        went_on = machine.train(resumed.name, "ddp", *job, *options, "--resume", "auto").expect()
        same = [
            "the same" if other.weights == whole.weights and other.losses == whole.losses else "other"
            for other in (again, went_on)
        ]
        words = f"{name}: repeated {same[0]} bits, resumed {same[1]}"
        (bad if options and "other" in same else results).append(words)
    return hold(not bad, "; ".join(bad + results))


@check("fp16", value=1, seconds=60)
def fp16(machine: Machine) -> str:
    """Half precision with a loss scale trains."""
    needs_gpu(machine)
    fp16 = ("--mixed_precision", "fp16")
    runs = [machine.train(f"{name} fp16", name, *machine.short(), launcher=fp16) for name in ("ddp", "z2")]
    return "; ".join(f"{run.folder.name}: last loss {run.expect().losses[-1]:.3f}" for run in runs)


@check("attention", value=2, seconds=100)
def attention(machine: Machine) -> str:
    """flex_attention, and flash_attention_2 where it is installed, draw sdpa's curve."""
    needs_gpu(machine)
    job = machine.short()
    reference = machine.train("sdpa", "ddp", *job, launcher=BF16).expect()
    kinds, not_tried = ["flex_attention"], ""
    try:
        needs_module("flash_attn")
        kinds.append("flash_attention_2")
    except NotTried as reason:
        not_tried = f"; not tried: {reason}"
    runs = [machine.train(kind, "ddp", *job, "--attn-implementation", kind, launcher=BF16) for kind in kinds]
    return agree(reference, runs, 2e-2) + not_tried


@check("liger", value=2, seconds=100)
def liger_kernels(machine: Machine) -> str:
    """--use-liger-kernel draws the curve without it, under ddp and z3; how much faster."""
    needs_gpu(machine)
    needs_module("liger_kernel")
    job = machine.short()
    plain = machine.train("no liger", "ddp", *job, launcher=BF16).expect()
    runs = [machine.train(f"{name} liger", name, *job, "--use-liger-kernel", launcher=BF16) for name in ("ddp", "z3")]
    differences = agree(plain, runs, 2e-2)
    speeds = [run.result["train_seconds"] for run in (plain, runs[0])]
    return f"{differences}; {speeds[0] / speeds[1]:.2f} times as fast under ddp"


@check("offload without nvcc", value=1, seconds=60)
def without_toolkit(machine: Machine) -> str:
    """Under z2_offload it runs where only a C++ compiler is."""
    needs_gpu(machine)
    needs_operators(machine, "cpu_adam")
    folders = [each for each in os.environ["PATH"].split(":") if not os.path.exists(os.path.join(each, "nvcc"))]
    hidden = {"PATH": ":".join(folders), "CUDA_HOME": "", "CUDA_PATH": ""}
    run = machine.train("no toolkit", "z2_offload", *machine.job(3), environment=hidden).expect()
    return f"losses {', '.join(f'{loss:.4f}' for loss in run.losses)}"
