"""Sequence parallelism: parts of rows, what is refused before a step, and groups beside each other."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
import yaml
from conftest import finished, stopped
from places import CONFIGS
from reference_job import FP32, JOB, goes_on_to_the_same_bits, layout, same_curve
from transformers import MistralConfig, MistralForCausalLM

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.batching.collate import empty
from accel_sft.batching.layouts import Batching
from accel_sft.batching.sequence import SequenceGroup, in_parts
from accel_sft.batching.trial import Trial
from accel_sft.chat.encoded import Encoded
from accel_sft.launch import groups

ROW = Encoded(0, list(range(10, 21)), 4)
PADDED = Batching("padded", 2**31, rows=1)
CPU = torch.device("cpu")


def parts_of(batch, ranks):
    return [SequenceGroup(ranks, rank, 1, 0).part(batch, 7) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [2, 3, 16])
def test_parts_of_a_row_predict_the_rows_targets(ranks):
    whole = PADDED.batch([ROW], 7, CPU)
    parts = parts_of(whole, ranks)
    assert len({part.inputs["input_ids"].shape for part in parts}) == 1  # else ranks could not exchange tokens
    ids = torch.cat([part.inputs["input_ids"] for part in parts], dim=1)[0]
    assert ids.tolist() == [*ROW.input_ids, *[7] * (len(ids) - len(ROW.input_ids))]
    assert torch.cat([part.inputs["position_ids"] for part in parts], dim=1)[0].tolist() == [*range(len(ids))]
    targets, sources = [], []
    for part in parts:
        assert len(part.keep) == max(len(part.targets), 1)
        targets += part.targets.tolist()
        sources += part.inputs["input_ids"][0][part.keep[: len(part.targets)]].tolist()
    assert targets == ROW.input_ids[4:]
    assert sources == ROW.input_ids[3:-1]
    for part in parts_of(empty(7), ranks):  # as in a forward without rows
        assert part.inputs["input_ids"].shape == (1, 1)
        assert (part.keep.tolist(), len(part.targets)) == ([0], 0)


def alone(model, ranks=2):
    """A model on the first rank of a group whose others are missing."""
    dimensions = SimpleNamespace(sp_size=ranks, tp_size=1, sp_handler=SimpleNamespace())
    accelerator = SimpleNamespace(parallelism_config=dimensions, process_index=0, num_processes=ranks)
    accelerator.device, accelerator.mixed_precision = CPU, "no"
    accelerator.unwrap_model = lambda model: model
    return Trial(accelerator, model, TrainConfig().resolved({}), [ROW], 7)


def mistral(**more):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    return MistralForCausalLM(
        MistralConfig(**shape, num_attention_heads=2, num_key_value_heads=1, **{"sliding_window": None, **more})
    )


def test_a_model_on_which_deepspeeds_attention_fails_is_refused(monkeypatch):
    def fails(*_, **__):
        raise TypeError("empty_like(): must be Tensor")  # a multimodal model's layers are told no positions

    monkeypatch.setitem(groups._shared, "sdpa", fails)
    monkeypatch.setattr(groups.ALL_ATTENTION_FUNCTIONS, "_local_mapping", {})
    with pytest.raises(UserError, match=r"its forward of a part of a row fails \(TypeError: empty_like.*z3.yaml"):
        in_parts(alone(mistral()), PADDED)


@pytest.mark.parametrize(
    ("window", "expected"),
    [
        (8, "it has layers without full attention (SlidingWindowLayer). Launch with z3.yaml."),
        (None, "with split rows its loss is off by"),  # the other rank's part is missing
    ],
)
def test_model_whose_rows_cannot_be_cut_is_refused_first(window, expected):
    with pytest.raises(UserError) as raised:
        in_parts(alone(mistral(sliding_window=window)), PADDED)
    (line,) = raised.value.problems
    assert line.startswith(f"This model does not work with sequence parallelism over 2 ranks: {expected}")


def test_attention_that_cannot_be_shared_is_refused():
    def prepare(*_):
        raise ValueError("Attention head count 2 is not divisible by SP size 3\nmore")

    for kind, reason in (
        ("sdpa", ": Attention head count 2 is not divisible by SP size 3; train with z3.yaml instead"),
        ("eager", " needs --attn-implementation sdpa, not eager"),
    ):
        subject = alone(mistral(attn_implementation=kind), ranks=3)
        subject.accelerator.prepare = prepare
        with pytest.raises(UserError, match=f"sequence parallelism over 3 ranks{reason}"):
            groups.prepare(subject.accelerator, subject.model)


def test_full_row_attention_works_where_ranks_outnumber_key_heads(monkeypatch):
    """DeepSpeed then gives ranks copies of key heads, and says so in the model."""
    model = mistral(attn_implementation="sdpa")
    (attention,) = (module for module in model.modules() if hasattr(module, "num_key_value_groups"))
    subject, own = alone(model), {}
    subject.accelerator.prepare = lambda model: own.update(sdpa=None) or model
    monkeypatch.setattr(groups, "_shared", {})
    monkeypatch.setattr(groups.ALL_ATTENTION_FUNCTIONS, "_local_mapping", own)
    groups.prepare(subject.accelerator, model)
    with groups.shared_rows():
        attention.num_key_value_groups = 1
    monkeypatch.setattr(groups, "_shared", {})
    assert model.eval()(input_ids=torch.tensor([[1, 2], [3, 4]]), use_cache=False).logits.shape == (2, 2, 32)


# tests/laws has the curve of one group at stage 3
@pytest.mark.parametrize("stage", [pytest.param(stage, marks=pytest.mark.long) for stage in (0, 2)])
def test_sequence_groups_have_one_curve_and_portable_checkpoints(launched, tmp_path, stage):
    content = yaml.safe_load((CONFIGS / "z3_sp.yaml").read_text()) | {"deepspeed_config": {"zero_stage": stage}}
    (tmp_path / "sp.yaml").write_text(yaml.safe_dump(content))
    arguments = (*JOB, "--save-every", "3", "--keep-checkpoints", "9", "--gradient-checkpointing")
    four = {"yaml": str(tmp_path / "sp"), "launcher": ("--num_processes", "4", *FP32)}
    whole = launched(f"four ranks in two groups {stage}", *arguments, **four)
    same_curve(layout(launched, "plain").lines(), whole.lines())
    goes_on_to_the_same_bits(whole, tmp_path / "again", 3)
    folder = stopped(whole, tmp_path / "other", 3)
    other = finished(*arguments, "--resume", "auto", run_dir=folder, yaml="z2", launcher=FP32)
    same_curve(layout(launched, "plain").lines(), other.lines())
    shared = {"run_dir": tmp_path / "evaluation", "yaml": "z3_sp", "launcher": FP32}
    finished("evaluate", "math", "--model", str(whole.run_dir), **shared)
    metrics = json.loads((tmp_path / "evaluation" / "result.json").read_text())["after"]
    assert metrics["eval_loss"] == pytest.approx(whole.result()["after"]["eval_loss"], rel=1e-5)
