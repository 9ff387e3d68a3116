"""Models of published sizes on GPUs: their speed, and their memory beside what was predicted."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest
from launches import BF16
from places import ROOT

pytestmark = [pytest.mark.timeout(1800), pytest.mark.long]
DEVICE_SHARE, HOST_SHARE, HOST_MORE = 0.15, 0.25, 1.0
"""Largest shares by which measured memory may differ from what was predicted; host memory may be this many GiB more."""
SCALING = 0.7
"""Least speed on all GPUs, as a share of the speed of one times their number."""


def trained(machine, size, yaml, *options, processes=0):
    """A run of a model of this size (benchmarks/gpu.py) with random weights on rows of 1,024 tokens, 16 rows a
    step and process; the same one is run once."""
    processes = processes or machine.processes
    name = " ".join([size, yaml, f"on {processes}", *(option.removeprefix("--") for option in options)])

    def run():
        model = machine.once(size, lambda: random_model(machine, size))
        job = ("--model", str(model), "--train-file", str(machine.once("rows", lambda: random_rows(machine))))
        job += ("--max-steps", "12" if machine.devices else "6", "--eval-every", "off", "--save-every", "off")
        job += ("--global-batch-size", str((16 if machine.devices else 2) * processes), "--max-length", "2048")
        return machine.train(name, yaml, *job, *options, launcher=BF16, processes=processes, task="chat").expect()

    return machine.once(name, run)


def random_model(machine, size):
    """The folder of a model of this size, made in a process of its own: this one holds no memory on a card."""
    import gpu

    folder, sizes = machine.folder / f"model {size}", {**gpu.MODELS[size], **({} if machine.devices else gpu.TINY)}
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), "--make-model", json.dumps(sizes), str(folder)]
    subprocess.run(command, check=True, env=machine.environment)
    return folder


def random_rows(machine):
    """A file of chats of 1,024 tokens of random words, 16 of them the question's; of 64 tokens without GPUs."""
    import shapes

    answer, words = (1008, 512) if machine.devices else (48, 64)
    made = shapes.make_rows(shapes.Shape(0, (16, 17), (answer, answer + 1), words, 0))
    file = machine.folder / "rows.jsonl"
    pairs = ({"prompt": row["question"], "completion": row["answer"]} for row in made)
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return file


def tokens_per_second(run):
    """In the median of the later half of the steps."""
    return statistics.median(line["tokens_per_second"] for line in run.lines()[len(run.lines()) // 2 :])


def takes_the_predicted_memory(machine, run):
    """Print a run's speed and its measured beside its predicted peaks, and hold them together on GPUs."""
    print(f"{run.run_dir.name}: {tokens_per_second(run):,.0f} tokens/s, MFU {run.result().get('mfu')}")
    assert len(run.result()["memory"]) >= (2 if machine.devices else 1)
    for place, phases in run.result()["memory"].items():
        steps = [phases[name] for name in ("first_step", "step") if name in phases]
        predicted, measured = (max(step[key] for step in steps) for key in ("predicted_gib", "measured_gib"))
        print(f"{place} {measured:.2f} GiB, predicted {predicted:.2f}")
        if place == "device":
            assert abs(measured / predicted - 1) <= DEVICE_SHARE
        elif machine.devices:
            assert measured <= (1 + HOST_SHARE) * predicted + HOST_MORE


@pytest.mark.parametrize(
    ("size", "yaml", "options"),
    [
        *(("0.5B", yaml, ()) for yaml in ("ddp", "z2", "z3", "fsdp2")),
        *(("1.5B", yaml, ()) for yaml in ("z0", "z2")),
        *(("7B", yaml, ("--adapter", "lora")) for yaml in ("ddp", "z3")),
    ],
)
def test_model_of_this_size_takes_the_predicted_memory(machine, size, yaml, options):
    takes_the_predicted_memory(machine, trained(machine, size, yaml, *options))


@pytest.mark.parametrize("yaml", ["z2_offload", "fsdp2_offload"])
def test_offloaded_model_takes_the_predicted_host_memory(machine, yaml):
    machine.needs("cpu_adam")
    takes_the_predicted_memory(machine, trained(machine, "0.5B", yaml))


def test_all_gpus_train_nearly_as_many_times_faster(machine):
    if machine.processes < 2:
        pytest.skip("needs 2 GPUs")
    one, all_of_them = trained(machine, "0.5B", "ddp", processes=1), trained(machine, "0.5B", "ddp")
    share = tokens_per_second(all_of_them) / tokens_per_second(one) / machine.processes
    print(f"{share:.0%} of {machine.processes} times one")
    assert share >= SCALING or not machine.devices
