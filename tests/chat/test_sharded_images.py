"""Rows with images where ranks share out the layers that read images: ZeRO-3 and FSDP2."""

from __future__ import annotations

import json
from functools import cache, partial
from types import SimpleNamespace

import fsdp2_on_cpu
import pytest
import torch
import vision
from accelerate import Accelerator
from conftest import finished, stopped
from matrix import matrix, run
from reference_job import FP32, SHARDED
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.batching import verify
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.trial import Trial
from accel_sft.chat.encode import blank_row
from accel_sft.chat.encoded import Encoded
from accel_sft.chat.image_inputs import ImageInputs
from accel_sft.models.source import find_source
from accel_sft.models.tokenizer import load_processor
from accel_sft.training import prepare

TASK = f"{vision.__file__}:Colours"
JOB = ("--global-batch-size", "4", "--micro-batch-size", "1", "--max-new-tokens", "6", "--learning-rate", "0.003")
JOB += ("--max-steps", "5", "--eval-every", "5", "--save-every", "2", "--keep-checkpoints", "3", "--dtype", "float32")
ONE_PICTURED = ("--one-in", "20")
LAUNCHES = {yaml: {"yaml": yaml, "launcher": FP32} for yaml in ("ddp", "z2", "z3", "z3_offload")} | {"fsdp2": SHARDED}
LAUNCHES["hsdp"] = SHARDED | {"yaml": "hsdp", "launcher": ("--num_processes", "4", *FP32)}
FAMILIES = [pytest.param(name, marks=pytest.mark.long) for name in vision.FAMILIES if name != "qwen2_vl"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """`made(family)`: the folder of a model, made once."""
    make = cache(lambda family: vision.make(tmp_path_factory.mktemp(family) / "model", family))
    return lambda family="qwen2_vl": make(family)


def skip_unless_it_runs_here(layout):
    if layout in ("fsdp2", "hsdp") and not fsdp2_on_cpu.RUNS_HERE:
        pytest.skip("this torch's FSDP2 does not run on CPUs")


@pytest.fixture
def trained(launched, made):
    """`trained(layout, *options)`: a run of that layout (None: one process), made once."""

    def run(layout, *options, family="qwen2_vl"):
        skip_unless_it_runs_here(layout)
        name = " ".join(["images", family, layout or "one", *options])
        return launched(name, TASK, *JOB, *options, "--model", str(made(family)), **LAUNCHES.get(layout, {}))

    return run


def assert_same_curve(ours, theirs):
    assert len(ours.lines()) == len(theirs.lines())
    for one, other in zip(ours.lines(), theirs.lines(), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=2e-5)
    for one, other in zip(ours.lines("eval_loss"), theirs.lines("eval_loss"), strict=True):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=2e-5)
        assert one["right"] == other["right"]
    answers = [(run.run_dir / "samples" / "step-000005.jsonl").read_text() for run in (ours, theirs)]
    assert [json.loads(line)["generated"] for line in answers[0].splitlines()] == [
        json.loads(line)["generated"] for line in answers[1].splitlines()
    ]
    assert names_and_types(ours.run_dir / "final") == names_and_types(theirs.run_dir / "final")


def names_and_types(folder):
    (file,) = folder.glob("*.safetensors")
    return {name: weight.dtype for name, weight in load_file(file).items()}


# of twenty rows one has an image: in four steps no rank has one, in one step a single rank
def ranks_without_an_image_keep_nobody_waiting_and_change_no_loss(trained, made, layout):
    assert_same_curve(trained(layout, *ONE_PICTURED), one := trained(None, *ONE_PICTURED))
    assert names_and_types(one.run_dir / "best") == names_and_types(made())


def every_layout_draws_the_curve_of_one_process(trained, layout, family):
    if family != "qwen2_vl" and layout in ("ddp", "z2", "z3_offload"):
        pytest.skip("what differs between families is seen where their layers are shared out")
    assert_same_curve(trained(layout, family=family), trained(None, family=family))


# in four of five steps no rank has an image: the tower's gradients are zero, and no rank waits for them
def parts_of_what_reads_images_are_trained_by_name(trained, made, layout):
    options = (*ONE_PICTURED, "--train-only", r"visual\.merger|layers\.1\.")
    one = trained(None, *options)
    assert "visual.merger" in one.output
    before, after = (load_file(folder / "model.safetensors") for folder in (made(), one.run_dir / "final"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "visual.merger" in name or "layers.1." in name}
    assert_same_curve(trained(layout, *options), one)


def an_adapter_with_recomputed_activations_draws_the_curve_of_one_process(trained, layout):
    options = ("--adapter", "lora", "--lora-dropout", "0", "--gradient-checkpointing")
    assert_same_curve(trained(layout, *options), trained(None, *options))


def a_resumed_run_ends_with_the_same_bits_and_the_export_is_loaded_by_transformers(trained, tmp_path, layout):
    whole = trained(layout)
    again = stopped(whole, tmp_path / "run", 2)
    finished(*whole.arguments, "--resume", "auto", run_dir=again, **LAUNCHES[layout])
    one, other = (load_file(folder / "final" / "model.safetensors") for folder in (whole.run_dir, again))
    assert all(torch.equal(one[name], other[name]) for name in one)
    loaded = AutoModelForImageTextToText.from_pretrained(again / "final", dtype=torch.float32).state_dict()
    assert all(weight.equal(loaded[name]) for name, weight in loaded.items())
    finished("evaluate", TASK, "--model", str(again), run_dir=tmp_path / "evaluation", **LAUNCHES[layout])
    exported_metrics = json.loads((tmp_path / "evaluation" / "result.json").read_text())["after"]
    own = whole.result()["after"]
    assert exported_metrics["eval_loss"] == pytest.approx(own["eval_loss"], rel=2e-5)
    assert exported_metrics["right"] == own["right"]


def a_run_goes_on_under_another_layout(trained, tmp_path, first, then):
    skip_unless_it_runs_here(then)
    whole = trained(first)
    again = stopped(whole, tmp_path / "run", 2)
    went_on = finished(*whole.arguments, "--resume", "auto", run_dir=again, **LAUNCHES[then])
    assert_same_curve(went_on, whole)


def under(check, *layouts, **options):
    return [partial(check, layout=name, **options) for name in layouts]


@matrix(
    *under(ranks_without_an_image_keep_nobody_waiting_and_change_no_loss, "z3", "fsdp2", "hsdp"),
    *[
        check
        for family in vision.FAMILIES
        for check in under(
            every_layout_draws_the_curve_of_one_process, "ddp", "z2", "z3", "z3_offload", "fsdp2", family=family
        )
    ],
    *under(parts_of_what_reads_images_are_trained_by_name, "ddp", "z2", "z3", "fsdp2"),
    *under(an_adapter_with_recomputed_activations_draws_the_curve_of_one_process, "z3", "fsdp2"),
    *under(a_resumed_run_ends_with_the_same_bits_and_the_export_is_loaded_by_transformers, "z3", "fsdp2"),
    *[
        partial(a_run_goes_on_under_another_layout, first=first, then=then)
        for first, then in (("z3", "z2"), ("z2", "z3"), ("z3", "fsdp2"))
    ],
)
def test_images_under_sharded_launches(check, request):
    run(check, request)


def test_sequence_parallelism_refuses_images(monkeypatch):
    monkeypatch.setattr(prepare, "sequence_ranks", lambda accelerator: 2)
    pictured = SimpleNamespace(kept=SimpleNamespace(pictured=[0]))
    with pytest.raises(UserError, match="sequence parallelism would cut an image's tokens apart; launch with"):
        prepare.Assembly.load_model(SimpleNamespace(accelerator=None), pictured)


def loaded(folder):
    """The model, and a row with a blank image for it."""
    inputs = ImageInputs(lambda: load_processor(find_source(str(folder)), model=str(folder), trust_remote_code=False))
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32), blank_row(inputs)


@pytest.mark.parametrize("family", ["qwen2_vl", *FAMILIES])
@pytest.mark.parametrize("head", ["labelled", "pieces", "everywhere"])
def test_blank_image_reaches_all_weights_without_changing_gradients(made, family, head):
    model, blank = loaded(made(family))
    cpu = torch.device("cpu")
    rows = [Encoded(index, [3 + (7 * index + at) % 60 for at in range(9 - 2 * index)], 3) for index in range(2)]
    ways = Batching("padded", 512, head=head)

    def gradients(rows, blank):
        model.zero_grad()
        loss = nll_sum(model, ways.batch(rows, 0, cpu, blank))
        loss.backward()
        return loss, {name: parameter.grad for name, parameter in model.named_parameters()}

    loss, plain = gradients(rows, None)
    with_blank, without = gradients(rows, blank)
    assert with_blank.item() == pytest.approx(loss.item(), rel=1e-6)
    eyes = [name for name in without if plain[name] is None]
    assert eyes
    for name, gradient in without.items():
        if name in eyes:
            assert not gradient.any(), name
        else:
            assert (gradient - plain[name]).norm() <= 1e-5 * plain[name].norm(), name
    none, of_nothing = gradients([], blank)
    assert none.item() == 0
    assert all(gradient is not None and not gradient.any() for gradient in of_nothing.values())


def test_model_reading_images_in_sequence_is_refused_under_sharding(made, monkeypatch):
    model, blank = loaded(made())
    pictured = [
        blank._replace(index=index, input_ids=[*blank.input_ids, *range(5, 8 + index)], prompt_length=18)
        for index in range(3)
    ]
    config = TrainConfig(dtype="float32").resolved({})
    trial = Trial(Accelerator(cpu=True), model, config, pictured, 0, blank=blank)
    monkeypatch.setattr(verify, "forwards_alone", lambda accelerator: False)
    assert verify.exact_batchings(trial, ())[0][0].layout == "padded"
    whole = type(model.model).get_image_features

    def one_by_one(self, pixel_values, image_grid_thw, **more):
        pixels = pixel_values.split(image_grid_thw.prod(-1).tolist())
        outputs = [whole(self, of_one, image_grid_thw[at : at + 1], **more) for at, of_one in enumerate(pixels)]
        outputs[0].pooler_output = tuple(part for one in outputs for part in one.pooler_output)
        return outputs[0]

    monkeypatch.setattr(type(model.model), "get_image_features", one_by_one)
    with pytest.raises(UserError, match="reads images one by one"):
        verify.exact_batchings(trial, ())
