"""AdaLoRA keeps what one process keeps under every launch, on all ranks alike, and a resumed run goes on choosing."""

from __future__ import annotations

import json
from functools import partial

import fsdp2_on_cpu
import pytest
import torch
from conftest import finished, stopped
from matrix import matrix, run
from peft import PeftModel
from places import CONFIGS, SUPPORT
from reference_job import FP32
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

STEPS, FIRST, FINAL = 20, 10, 14
"""Number of steps, and the steps, from 0, that allocate ranks: in FINAL for good."""
JOB = ("math", "--max-steps", str(STEPS), "--save-every", "3", "--global-batch-size", "4", "--eval-every", "off")
JOB += ("--train-examples", "60", "--validation-examples", "4", "--seed", "7", "--micro-batch-size", "2")
JOB += ("--adapter", "adalora", "--lora-r", "4", "--learning-rate", "0.01", "--max-grad-norm", "0.3")
JOB += ("--keep-checkpoints", "9")
SEEN = {"module": "adalora_ranks", "environment": {"PYTHONPATH": str(SUPPORT)}, "launcher": FP32}
LAYOUTS = ["z2", "ddp", "z0", "z1", "z2_offload", "z3", "z3_offload"]
LAYOUTS += ["fsdp2", "fsdp2_offload"] if fsdp2_on_cpu.RUNS_HERE else []
IDS = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]])


def sharing(yaml):
    return {"yaml": yaml, **SEEN}


@pytest.fixture
def alone(launched):
    """The run on one process, under the launcher: its lines are what all others are held to."""
    single = {"launcher": (*FP32, "--num_processes", "1")}
    return launched("adalora alone", *JOB, **(sharing("ddp") | single))


def chosen(run_dir):
    """What all ranks saw and chose, which must be the same: a list of (step, digest, ranks kept)."""
    every = [
        [json.loads(line) for line in file.read_text().splitlines()] for file in sorted(run_dir.glob("kept-rank-*"))
    ]
    assert all(rank == every[0] for rank in every)
    return every[0]


def weights(folder):
    return load_file(folder / "adapter_model.safetensors")


def logits(folder):
    base = json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()
    with torch.no_grad():
        return model(IDS).logits


def choose_what_one_process_chooses_and_learn_the_same(launched, alone, yaml):
    run = launched(f"adalora {yaml}", *JOB, **sharing(yaml))
    assert len([*run.run_dir.glob("kept-rank-*")]) == 2
    ours, theirs = chosen(run.run_dir), chosen(alone.run_dir)
    assert [(line["step"], line["kept"]) for line in ours] == [(line["step"], line["kept"]) for line in theirs]
    assert [line["step"] for line in theirs] == list(range(STEPS))
    allocated = [sum(map(sum, theirs[step]["kept"].values())) for step in (FIRST - 1, FIRST, FINAL, STEPS - 1)]
    assert allocated[0] == 0 < allocated[2] < allocated[1]
    assert allocated[2] == allocated[3] == 4 * len(theirs[-1]["kept"])
    lines, expected = run.lines(), alone.lines()
    assert sum(line["grad_norm"] > 0.3 for line in expected) > 5  # gradients are clipped in some steps, by more or less
    for one, other in zip(lines, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-4)
    actual, wanted = weights(run.run_dir / "final"), weights(alone.run_dir / "final")
    assert {name: tensor.shape for name, tensor in actual.items()} == {n: tensor.shape for n, tensor in wanted.items()}
    torch.testing.assert_close(logits(run.run_dir / "final"), logits(alone.run_dir / "final"), rtol=1e-3, atol=1e-3)


def goes_on_to_the_bits_of_the_whole_run(request, tmp_path, yaml, step):
    launched = request.getfixturevalue("launched")
    whole = launched(f"adalora {yaml}", *JOB, **sharing(yaml)) if yaml else request.getfixturevalue("alone")
    folder = stopped(whole, tmp_path / "run", step)
    finished(*JOB, "--resume", "auto", run_dir=folder, environment=SEEN["environment"], **whole.options)
    assert chosen(folder)[STEPS:] == chosen(whole.run_dir)[step:]
    ours, theirs = weights(folder / "final"), weights(whole.run_dir / "final")
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []


def goes_on_with_the_same_choices_under_another_launch(launched, tmp_path, one, other):
    if other == "fsdp2" and other not in LAYOUTS:
        pytest.skip("this torch's FSDP2 does not run on CPUs")
    whole, step = launched(f"adalora {one}", *JOB, **sharing(one)), FIRST + 2
    again = finished(*JOB, "--resume", "auto", run_dir=stopped(whole, tmp_path / "run", step), **sharing(other))
    assert [line["kept"] for line in chosen(again.run_dir)[STEPS:]] == [
        line["kept"] for line in chosen(whole.run_dir)[step:]
    ]
    for mine, line in zip(again.lines()[step:], whole.lines()[step:], strict=True):
        assert mine["loss"] == pytest.approx(line["loss"], rel=2e-5)


LAUNCHES = ("z2", "z3"), ("z3", "z0"), ("z3_offload", "ddp"), ("ddp", "fsdp2")


@matrix(
    *[partial(goes_on_to_the_bits_of_the_whole_run, yaml=None, step=step) for step in (FIRST + 2, FINAL + 1)],
    *[partial(goes_on_to_the_bits_of_the_whole_run, yaml=yaml, step=FIRST + 2) for yaml in LAYOUTS],
    *[partial(goes_on_with_the_same_choices_under_another_launch, one=one, other=other) for one, other in LAUNCHES],
)
@pytest.mark.long
def test_a_stopped_run(check, request):
    run(check, request)


def keep_masked_in_bf16_what_was_masked_in_both_copies_of_the_weights(launched, tmp_path, yaml):
    run = launched(f"adalora bf16 {yaml}", *JOB, **(sharing(yaml) | {"launcher": ("--mixed_precision", "bf16")}))
    mask = chosen(run.run_dir)[-1]["kept"]  # each rank has compared both copies (adalora_ranks.py)
    assert sum(map(sum, mask.values())) == 4 * len(mask)
    assert torch.isfinite(logits(run.run_dir / "final")).all()


def train_on_in_zero_3_after_evaluations_and_export_whatever_stays_gathered(alone, tmp_path, stays_gathered):
    zero = {"stage": 3, "stage3_param_persistence_threshold": stays_gathered}
    zero["stage3_gather_16bit_weights_on_model_save"] = True
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": "auto"}}))
    launch = (CONFIGS / "z3_twin_flow.yaml").read_text().replace("z3_twin_flow.json", "ds.json")
    (tmp_path / "launch.yaml").write_text(launch)
    job = (*JOB, "--eval-every", "5", "--max-new-tokens", "4")
    run = finished(*job, run_dir=tmp_path / "run", **sharing(str(tmp_path / "launch")))
    assert len(run.lines("eval_loss")) == 5
    for one, other in zip(run.lines(), alone.lines(), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
    assert chosen(run.run_dir)[-1]["kept"] == chosen(alone.run_dir)[-1]["kept"]


ZERO = "z0", "z1", "z2", "z2_offload", "z3", "z3_offload"


@pytest.mark.long
@matrix(
    *[partial(choose_what_one_process_chooses_and_learn_the_same, yaml=yaml) for yaml in LAYOUTS],
    *[partial(keep_masked_in_bf16_what_was_masked_in_both_copies_of_the_weights, yaml=yaml) for yaml in ZERO],
    *[
        partial(train_on_in_zero_3_after_evaluations_and_export_whatever_stays_gathered, stays_gathered=count)
        for count in (0, 100_000)
    ],
)
def test_all_ranks(check, request):
    run(check, request)
