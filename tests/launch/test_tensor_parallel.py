"""Tensor parallelism: what is refused before weights are loaded, families' plans, and runs stopped and gone on with."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest
import torch
import transformers
from conftest import finished, stopped
from matrix import matrix, run
from places import SUPPORT
from reference_job import CUTS_WEIGHTS, FP32, JOB, ONCE, goes_on_to_the_same_bits, layout, same_curve, weights

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.limits import TENSOR_PARALLEL, launch_problem
from accel_sft.models import pretrained
from accel_sft.models.load import load_model
from accel_sft.models.pretrained import check_plan, cut_over
from accel_sft.models.source import Source

SHAPE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2}
FAMILIES = {
    "Qwen2Config": {"tie_word_embeddings": True},
    "LlamaConfig": {"attention_bias": True, "mlp_bias": True},
    "Gemma2Config": {"head_dim": 8},
    "Phi3Config": {"pad_token_id": 0, "eos_token_id": 1},
    "Olmo2Config": {"eos_token_id": 1},
}


def settings(name="Qwen2Config", **more):
    return getattr(transformers, name)(**{**SHAPE, **FAMILIES.get(name, {}), **more})


@pytest.fixture(scope="module")
def cut(tmp_path_factory):
    """What two ranks found of each family; see tensor_families.py."""
    root = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        torch.manual_seed(1)
        transformers.AutoModelForCausalLM.from_config(settings(name)).save_pretrained(root / name)
    families = {"module": "tensor_families", "environment": {"PYTHONPATH": str(SUPPORT)}}
    finished(str(root), yaml="tp", launcher=FP32, **families)
    return json.loads((root / "found.json").read_text())


def loss_gradients_and_norm_are_one_processs_and_a_checkpoint_restores_every_bit(cut, name):
    differences = cut[name]
    assert differences["parts"]
    assert differences["loss"] < 1e-6
    assert differences["gradient"] < 1e-4  # over two forwards
    assert differences["norm"] < 1e-5
    assert differences["restored"]


@pytest.mark.parametrize(
    ("config", "ranks", "images", "why"),
    [
        (transformers.GPT2Config(), 2, False, "transformers has no plan"),
        (settings(), 3, False, "its 4 attention heads and 2 heads of keys and values cannot be divided among 3 ranks"),
        (settings(), 2, True, "the data has images"),
        (settings(quantization_config={"quant_method": "fp8"}), 2, False, "its weights are quantized"),
        (settings(base_model_tp_plan={"layers": "of_tomorrow"}), 2, False, "not known to be exact (of_tomorrow)"),
        (settings("Qwen3Config"), 2, False, "not known to be exact (replicated_with_grad_allreduce)"),
        (settings("MixtralConfig"), 2, False, "not known to be exact (moe_tp_experts, packed_colwise)"),
    ],
)
def test_model_that_cannot_be_cut_is_refused_before_loading(config, ranks, images, why):
    with pytest.raises(UserError, match=re.escape(why)) as raised:
        check_plan("m", config, transformers.AutoModelForCausalLM, ranks, images=images)
    (line,) = raised.value.problems
    assert line.startswith("--model m: tensor parallelism cannot split this model: ")
    assert line.endswith("train with accelerate_configs/z3.yaml, which shards any model's weights")


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ({"adapter": "lora"}, "--adapter lora"),
        ({"optimizer": "adamw-8bit"}, "--optimizer adamw-8bit"),
        ({"load_in_4bit": True, "adapter": "lora"}, "--load-in-4bit"),
        ({"compile": True}, "--compile"),
    ],
)
def test_settings_that_need_whole_matrices_are_refused(option, flag):
    problem = launch_problem(TrainConfig(**option), TENSOR_PARALLEL)
    assert problem.startswith(f"{flag}: does not work with this launch; launch with accelerate_configs/")
    assert launch_problem(TrainConfig(), TENSOR_PARALLEL) is None


def test_a_saved_adapter_is_refused():
    with pytest.raises(UserError, match="--model a: tensor parallelism does not split adapters; merge this one"):
        load_model(Source("w", "t", "a"), TrainConfig(), precision="no", deepspeed=False, tensor_ranks=2)


def test_a_torch_that_cannot_cut_weights_is_refused(monkeypatch):
    monkeypatch.setattr(pretrained, "LOWEST_TORCH", "99")
    with pytest.raises(UserError, match=r"tensor parallelism needs torch 99 or newer, but .*z3.yaml"):
        cut_over(2)


def ranks_that_share_matrices_answer_and_export_as_one_process_does(launched):
    ours, theirs = layout(launched, "tp"), layout(launched, "plain")
    assert "tensor parallel, each matrix shared by 2 ranks" in ours.output
    for one, other in zip(ours.lines("eval_loss"), theirs.lines("eval_loss"), strict=True):
        assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=2e-5)
        assert one["accuracy"] == other["accuracy"]
    for file in sorted((theirs.run_dir / "samples").glob("*.jsonl")):
        assert (ours.run_dir / "samples" / file.name).read_text() == file.read_text()
    exported, expected = weights(ours.run_dir / "final"), weights(theirs.run_dir / "final")
    assert exported.keys() == expected.keys()  # tied weights once
    for name, weight in exported.items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-4)
    assert "distributed_config" not in (ours.run_dir / "final" / "config.json").read_text()


def a_stopped_run_goes_on_to_the_same_bits(launched, tmp_path):
    goes_on_to_the_same_bits(layout(launched, "tp"), tmp_path / "run", 3)


def a_stopped_run_goes_on_under_another_launch(launched, tmp_path, before, then):
    whole = layout(launched, before)
    folder = stopped(whole, tmp_path / "run", 3)
    went_on = finished(*whole.arguments, "--resume", "auto", run_dir=folder, yaml=then, launcher=FP32)
    same_curve(whole.lines(), went_on.lines())
    assert before != "tp" or "ranks of a matrix 2, now none" in went_on.output


def recomputed_activations_and_matrices_alone_draw_one_processs_curve(launched):
    arguments = (*JOB, *ONCE, "--gradient-checkpointing", "--train-only", "q_proj|o_proj")
    ours = launched("tp of some matrices", *arguments, yaml="tp", launcher=FP32)
    same_curve(launched("one process of some matrices", *arguments).lines(), ours.lines())


def evaluate_gives_the_runs_own_numbers(launched, tmp_path):
    whole = layout(launched, "tp")
    arguments = ("evaluate", "math", "--model", str(whole.run_dir))
    finished(*arguments, run_dir=tmp_path / "evaluation", yaml="tp", launcher=FP32)
    alone, own = json.loads((tmp_path / "evaluation" / "result.json").read_text())["after"], whole.result()["after"]
    assert alone["eval_loss"] == pytest.approx(own["eval_loss"], rel=1e-5)
    assert alone["accuracy"] == own["accuracy"]


@CUTS_WEIGHTS
@matrix(
    ranks_that_share_matrices_answer_and_export_as_one_process_does,
    *(
        partial(loss_gradients_and_norm_are_one_processs_and_a_checkpoint_restores_every_bit, name=name)
        for name in FAMILIES
    ),
    a_stopped_run_goes_on_to_the_same_bits,
    partial(a_stopped_run_goes_on_under_another_launch, before="tp", then="z2"),
    partial(a_stopped_run_goes_on_under_another_launch, before="z2", then="tp"),
    recomputed_activations_and_matrices_alone_draw_one_processs_curve,
    evaluate_gives_the_runs_own_numbers,
)
def test_runs_whose_matrices_are_shared_by_ranks(check, request):
    run(check, request)
