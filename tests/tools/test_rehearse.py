"""`accel-sft rehearse`: the whole run on a shrunk model, and the faults that it finds before they cost anything."""

from __future__ import annotations

import json

import architectures
import forked_launches
import pytest
import vision
from conftest import accel_sft
from models import Sums, encode, make_tiny
from rehearsal_faults import FAULTS, options
from transformers import AutoTokenizer

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.tool_configs import RehearseConfig
from accel_sft.models.source import find_source
from accel_sft.tools.rehearse import runs
from accel_sft.tools.rehearse.command import Rehearsal
from accel_sft.tools.rehearse.reload import Reloaded
from accel_sft.tools.rehearse.runs import STAGES, Stage, Stages
from accel_sft.tools.rehearse.shrunk import shrink
from accel_sft_math import Math

LONG = pytest.mark.long


def rehearsal(*arguments):
    """The exit status and the stages of a rehearsal, by name."""
    done = accel_sft("rehearse", *arguments, "--json")
    assert '{\n  "version"' in done.output, done.output[-6000:]
    report = json.JSONDecoder().raw_decode(done.output[done.output.index('{\n  "version"') :])[0]
    return done.status, {stage["stage"]: stage for stage in report["stages"]}


def pictured(folder):
    """Rows that all have images, for a model of which only a part beside its language model is trained."""
    for split, numbers in (("train", range(20)), ("validation", range(20, 26))):
        rows = []
        for number in numbers:
            colour = [*vision.COLOURS][number % 4]
            vision.write_picture(vision.picture(number, colour), folder / f"{number}.png")
            rows.append(
                {"prompt": "<image>What is this?", "images": [f"{number}.png"], "completion": f"It is {colour}"}
            )
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ("--train-file", str(folder / "train.jsonl"), "--validation-file", str(folder / "validation.jsonl"))
    model = ("--model", str(vision.make(folder / "model", "qwen2_5_vl")), "--train-only", r"visual\.merger")
    return ("chat", *files, *model, "--max-steps", "20")


SOUND = {
    "no checkpoints": options("--save-every", "off"),
    "tiny": options(),
    "lora, ddp": options("--adapter", "lora", "--launch", "ddp"),
    "z3": options("--launch", "z3"),
    "images": pictured,
}
"""Sound runs; without checkpoints nothing is killed and resumed, which takes two thirds of the time."""


@pytest.mark.parametrize("name", ["no checkpoints", *(pytest.param(name, marks=LONG) for name in [*SOUND][1:])])
def test_every_stage_of_a_sound_run_holds(name, tmp_path):
    status, stages = rehearsal(*SOUND[name](tmp_path))
    resumed = stages.pop("resume")
    assert status == 0, stages
    assert {name: (stage["state"], stage["findings"]) for name, stage in stages.items()} == {
        name: ("holds", []) for name in STAGES if name != "resume"
    }
    if name == "no checkpoints":
        assert resumed["findings"][0]["what"] == "--save-every off: a run that is killed starts over"
    else:
        assert (resumed["state"], "same bits" in resumed["seen"]) == ("holds", True)


FAMILIES = [pytest.param(name, marks=[] if name == "qwen3_moe" else LONG) for name in architectures.FAMILIES]


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_reported_of_a_family(family, tmp_path, monkeypatch):
    forked_launches.use(monkeypatch, runs)
    model = architectures.make(tmp_path / "real", family)
    stages = Stages(lambda line: None)
    task, config = Math(train_examples=100, validation_examples=8), RehearseConfig(model=str(model))
    Rehearsal("math", task, config, tmp_path, stages).run()
    if family == "deepseek_v4":  # its indexer only chooses what attention sees, and takes no gradient: that is true
        (finding,), stages.all["trained"] = stages.all["trained"].findings, Stage("trained", "holds")
        assert (finding.level, "indexer" in finding.what, "without a gradient" in finding.what) == ("warns", True, True)
    assert {name: (stage.state, stage.findings) for name, stage in stages.all.items()} == dict.fromkeys(
        STAGES, ("holds", [])
    ), (tmp_path / "whole.log").read_text()[-3000:]
    assert "killed (SIGKILL)" in stages.all["resume"].seen


OFTEN = ("an adapter on a layer that is not there",)
"""Planted in the default run, too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in OFTEN else LONG) for name in FAULTS])
def test_a_planted_fault_is_found_and_named(name, tmp_path):
    fault = FAULTS[name]
    status, stages = rehearsal(*fault.plant(tmp_path))
    named = {name: stage["findings"] for name, stage in stages.items() if stage["findings"]}
    assert list(named) == [fault.stage], stages
    assert fault.words in json.dumps(named[fault.stage])
    assert status == any(finding["level"] == "fails" for finding in named[fault.stage])


def test_trainers_message_is_not_cut_at_a_semicolon():
    lines, message = [], "row 3: a; b is no answer; write one; or leave the row out"
    stages = Stages(lines.append)
    with stages.reported("data"):
        raise UserError(message)
    assert [finding.what for finding in stages.all["data"].findings] == [message]
    assert " ".join(" ".join(lines).split()).endswith(f"fails {message}")


def test_texts_and_tokens_are_not_cut_like_lists_of_layers(tmp_path):
    folder = make_tiny(tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": len("silu"), "layer_types": ["full_attention"] * 4, "eos_token_id": [0, 1, 2, 3]}
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "small").mkdir()
    assert "2 of 4 layers" in shrink(find_source(str(folder)), tmp_path / "small", TrainConfig())[0]
    small = json.loads((tmp_path / "small" / "config.json").read_text())
    assert (small["hidden_act"], small["eos_token_id"]) == ("silu", [0, 1, 2, 3])
    assert len(small["layer_types"]) == 2


def test_exported_weights_that_are_not_the_trained_ones_are_found(tmp_path):
    final = make_tiny(tmp_path / "final")
    tokenizer = AutoTokenizer.from_pretrained(final)
    rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": 512, "truncation": "error"}
    rows = encode(tokenizer, Sums(), Sums().dataset("train"), "train", **rules).kept
    exported = Reloaded(final, TrainConfig(), rows)
    loss = exported.loss()
    other = "the exported weights do not predict as the trained weights did"
    for evaluated, said in (([2, 1], []), ([2, 1.01], [other]), ([1, 1], ["nothing was learnt"]), ([], [])):
        findings = exported.reload([loss * share for share in evaluated], "no")[1]
        assert [finding.what.split(":")[0] for finding in findings] == said
    none = Reloaded(final, TrainConfig(), [])  # --max-length leaves the evaluated ones out
    assert none.reload([loss], "no") == ("loaded; losses are not compared, because no evaluated row is left", [])
