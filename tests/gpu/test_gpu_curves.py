"""A step on GPUs: every launch, layout, precision and kernel draws the curve of one process; what runs in it."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil

import pytest
from launches import BF16, FLOAT32, agree

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]
LAUNCHES = {  # with the operators that DeepSpeed compiles for them, once on a machine
    **dict.fromkeys(("ddp", "z2", "z3", "fsdp2", "z1", "z0", "fsdp2_offload", "hsdp", "z3_sp", "tp"), ()),
    **dict.fromkeys(("z2_offload", "z3_offload", "z3_twin_flow"), ("cpu_adam",)),
    "z3_nvme": ("cpu_adam", "async_io"),
}

ATTENTION = re.compile(
    r"(aten::_(scaled_dot_product_\w*attention\w*|(flash|cudnn|efficient)_attention_forward)|\w+::_?varlen_attn\w*)"
)
"""An operator of torch that computes attention in a forward, unless its name ends with `backward`."""


def test_readmes_job_learns_its_task(machine):
    result = machine.train("readme", "ddp", *(() if machine.devices else machine.job(4))).expect().result()
    print(f"{result['after']}, {result['train_seconds']:.0f} s, peak {result['peak_device_memory_gib']} GiB")
    if machine.devices:
        assert result["after"]["accuracy"] >= 0.9
        assert result["peak_device_memory_gib"]


@pytest.mark.parametrize("yaml", LAUNCHES)
def test_launch_draws_the_curve_of_one_process(machine, yaml):
    processes = machine.processes if machine.devices or yaml != "hsdp" else 4
    if yaml == "hsdp" and (processes < 4 or processes % 2):
        pytest.skip("two groups of two or more: needs 4 GPUs, or 6, or 8")
    if yaml == "z3_sp" and processes % 2:
        pytest.skip("two ranks share a row: needs an even number of GPUs")
    if yaml == "tp" and processes not in (2, 4):
        pytest.skip("the model's 4 heads are cut over 2 or 4 GPUs")
    machine.compiles(*LAUNCHES[yaml])
    size = ("--parallelism_config_tp_size", str(processes)) if yaml == "tp" else ()
    run = machine.train(yaml, yaml, *machine.short(), launcher=(*FLOAT32, *size), processes=processes)
    agree(machine.reference(), [run], 2e-5)


@pytest.mark.parametrize("yaml", ["ddp", "z2", "z3", "fsdp2"])
def test_layouts_draw_one_curve_in_bf16(machine, yaml):
    def trained(name, yaml, layout, **launch):
        return machine.train(name, yaml, *machine.short("--batching", layout), launcher=BF16, **launch).expect()

    padded = machine.once("bf16", lambda: trained("bf16", "ddp", "padded", processes=1))
    agree(padded, [trained(f"bf16 {yaml} {layout}", yaml, layout) for layout in ("shared", "packed", "padded")], 2e-2)


def test_deterministic_run_repeats_and_resumes_with_the_same_bits(machine):
    steps, every = ("12", "4") if machine.devices else ("6", "2")
    job = machine.job(int(steps), "--save-every", every, "--keep-checkpoints", "9", "--deterministic")
    whole, again = (machine.train(f"deterministic {number}", "ddp", *job).expect() for number in (1, 2))
    resumed = machine.folder / "deterministic resumed"
    shutil.copytree(whole.run_dir, resumed)
    shutil.rmtree(resumed / "final")
    for newer in sorted((resumed / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(newer)
    (resumed / "result.json").write_text('{"status": "running"}')
    continued = machine.train(resumed.name, "ddp", *job, "--resume", "auto").expect()
    assert again.weights() == continued.weights() == whole.weights()
    assert again.losses() == continued.losses() == whole.losses()


@pytest.mark.parametrize("yaml", ["ddp", "z2"])
def test_half_precision_with_a_loss_scale_trains(machine, yaml):
    machine.needs()
    machine.train(f"fp16 {yaml}", yaml, *machine.short(), launcher=("--mixed_precision", "fp16")).expect()


@pytest.mark.parametrize(
    ("option", "module"),
    [
        ("--attn-implementation flex_attention", ""),
        ("--attn-implementation flash_attention_2", "flash_attn"),
        ("--use-liger-kernel", "liger_kernel"),
    ],
)
def test_other_kernels_draw_the_usual_curve(machine, option, module):
    machine.needs(module=module)
    usual = machine.once("sdpa", lambda: machine.train("sdpa", "ddp", *machine.short(), launcher=BF16).expect())
    names = ("ddp", "z3") if module == "liger_kernel" else ("ddp",)
    job = machine.short(*option.split())
    runs = [machine.train(f"{name} {option}", name, *job, launcher=BF16).expect() for name in names]
    agree(usual, runs, 2e-2)
    print(f"{usual.result()['train_seconds'] / runs[0].result()['train_seconds']:.2f} times as fast")


def test_offload_needs_no_cuda_toolkit(machine):
    machine.needs("cpu_adam")
    folders = [each for each in os.environ["PATH"].split(":") if not os.path.exists(os.path.join(each, "nvcc"))]
    hidden = {"PATH": ":".join(folders), "CUDA_HOME": "", "CUDA_PATH": ""}
    machine.train("no toolkit", "z2_offload", *machine.job(3), environment=hidden).expect()


def traced(run):
    """How often each operator was called in the three steps that rank 0 of a run with --profile traced."""
    file = min((run.expect().run_dir / "profile").glob("rank0*.json"))
    return collections.Counter(event["name"] for event in json.loads(file.read_text())["traceEvents"] if "dur" in event)


def test_run_reports_where_its_time_went(machine):
    run = machine.train("watched", "ddp", *machine.short()).expect()
    spent = run.result()["time_spent"]
    print(run.says("on rank 0 a step took [^.]+"))
    assert sum(spent["parts"].values()) == pytest.approx(spent["seconds"], rel=1e-6)
    if machine.devices:
        assert run.result()["system"][0]["mean"]["gpu_percent"] > 0


@pytest.mark.parametrize("layout", ["shared", "packed", "padded"])
def test_no_attention_runs_in_cudnn(machine, layout):
    """It plans anew for each shape."""
    job = machine.short("--batching", layout, "--profile")
    run = machine.train(f"kernels {layout}", "ddp", *job, launcher=BF16)
    calls = {name: count for name, count in traced(run).items() if ATTENTION.fullmatch(name)}
    calls = {name: count for name, count in calls.items() if not name.endswith("backward")}
    print(calls)
    assert calls
    assert not any("cudnn" in name for name in calls)


def test_compiled_blocks_run_compiled_while_trained(machine):
    job = machine.short("--compile", "--gradient-checkpointing", "--profile")
    run = machine.train("compiled", "ddp", *job, launcher=BF16 if machine.devices else FLOAT32)
    calls = traced(run)
    regions = sum(count for name, count in calls.items() if name.startswith("Torch-Compiled Region"))
    layers = json.loads((run.run_dir / "final" / "config.json").read_text())["num_hidden_layers"]
    assert regions >= layers * calls["accel_sft: forward"]
