"""Where weights are looked for, and what is said when they are not there."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from chats import jsonl
from fake_hub import hub
from models import loaded, make_base, make_tiny
from safetensors.torch import load_file, save_file

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.api.tool_configs import PlanConfig
from accel_sft.commands.evaluate import _differences, _remembered
from accel_sft.commands.trained import Trained
from accel_sft.io import terminal
from accel_sft.io.run_dir import RunDir
from accel_sft.models import load
from accel_sft.models.load import load_model
from accel_sft.models.source import errors_explained, find_source, hub_place
from accel_sft.tools.plan.command import model_config
from accel_sft.training.prepare import source_of
from accel_sft_chat import Chat

RECORD = json.dumps({"task": "math", "config": {}, "task_options": {}, "launch": {"precision": "bf16"}})


def test_adapter_of_a_moved_run_has_its_base_and_record(tmp_path, monkeypatch):
    (tmp_path / "final").mkdir()
    (tmp_path / "run.json").write_text(RECORD)
    (tmp_path / "final" / "adapter_config.json").write_text('{"base_model_name_or_path": "org/gone"}')
    monkeypatch.chdir(tmp_path)
    assert RunDir.record_around("gpt2") is None
    assert RunDir.record_around("org/model") is None
    assert RunDir.record_around("final")["task"] == RunDir.record_around(".")["task"] == "math"
    monkeypatch.chdir("final")
    assert RunDir.record_around(".")["task"] == "math"
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").touch()
    for name in (".", str(tmp_path)):
        source = find_source(name)  # the run was moved
        assert (source.weights, Path(source.adapter).resolve()) == (str(tmp_path / "base"), tmp_path / "final")


def test_unreachable_hub_is_tried_once_before_anything_loads(monkeypatch, caplog):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    message = r"couldn.t connect to 'http://127.0.0.1:9' \(.*\); check the network, or name a folder"
    with pytest.raises(UserError, match=message):
        model_config(PlanConfig(model="some/model"))
    with pytest.raises(UserError, match=message), errors_explained("some/model"):
        pytest.fail("libraries would try for most of a minute")
    assert "thrown while requesting" not in caplog.text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is missing"),
        ({"base_model_name_or_path": "/no/such/gone"}, "the adapter's base .*gone is gone; restore it"),
    ],
)
def test_adapter_without_its_base_says_so(tmp_path, content, said):
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=said):
        find_source(str(tmp_path))


@pytest.mark.parametrize("name", ["", "~/no/such/folder", "runs/nosuch", "elsewhere/", "nosuch/run/final"])
def test_names_like_folders_are_never_looked_for_on_the_hub(tmp_path, monkeypatch, name):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        find_source(name)


def test_hub_wait_is_announced_and_cached_models_need_none(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "models--org--model" / "snapshots" / "main").mkdir(parents=True)
    monkeypatch.setattr(terminal, "SECONDS_OF_SILENCE", 0.05)
    with errors_explained("org/model"):
        time.sleep(0.5)
    assert re.fullmatch(r"(waiting for org/model from the hub: \d s so far\n)+", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("implementation", "message"),
    [
        ("nosuch", "--attn-implementation: "),
        ("flex_attention", "has no backward on a CPU"),
        ("kernels-community/flash-attn3", "needs a GPU for its kernels"),
    ],
)
def test_an_attention_that_cannot_be_used_is_named(tmp_path, monkeypatch, implementation, message):
    monkeypatch.setattr(load, "device_count", lambda: 0)
    with pytest.raises(UserError, match=message) as caught:
        loaded(make_tiny(tmp_path / "model"), 1, attn_implementation=implementation)
    assert "--model" not in str(caught.value)


def test_evaluation_names_its_differences_from_the_run(tmp_path):
    (tmp_path / "final").mkdir()
    (tmp_path / "run.json").write_text(RECORD)
    for folder in (tmp_path, tmp_path / "final"):
        assert _differences(Trained(str(folder)), "math", "bf16") == []
        other_task, other_precision = _differences(Trained(str(folder)), "ner", "no")
        assert other_task.endswith("was trained for math, but is scored for ner")
        assert other_precision.endswith("for the same scores, add --mixed_precision bf16")
    assert _differences(Trained("Qwen/Qwen2.5-0.5B-Instruct"), "ner", "no") == []


def test_pickled_code_in_weights_is_refused_and_never_run(tmp_path):
    folder, ran = make_tiny(tmp_path / "model"), tmp_path / "ran"
    (folder / "model.safetensors").unlink()
    evil = type("Evil", (), {"__reduce__": lambda self: (Path.touch, (ran,))})
    torch.save({"weight": evil()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="contain Python objects, which can run code; use safetensors") as caught:
        loaded(folder)
    assert "weights_only" not in str(caught.value)
    assert not ran.exists()


@pytest.mark.parametrize("content", [{"attn_implementation": "o/r"}, {"text": {"_attn_implementation": "o/r@v:f"}}])
def test_attention_from_hub_code_is_refused_unless_trusted(tmp_path, content):
    folder = make_tiny(tmp_path / "model")
    known = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**known, **content}))
    with pytest.raises(
        UserError, match=r"its attention is computed by code on the hub, o.*; choose --attn-implementation sdpa"
    ):
        loaded(folder)
    assert loaded(folder, attn_implementation="sdpa").config._attn_implementation == "sdpa"


@pytest.fixture
def kept_by_the_hub(tmp_path, monkeypatch):
    """The cache of a hub that cannot be reached, with two commits of org/model: main has the second, v1 the first."""
    folder, commits = tmp_path / "models--org--model", ("a" * 40, "b" * 40)
    for seed, commit in enumerate(commits):
        base = make_base(folder / "snapshots" / commit)
        weights = load_file(base / "model.safetensors")
        save_file({name: w + seed for name, w in weights.items()}, base / "model.safetensors", {"format": "pt"})
    (folder / "refs").mkdir()
    for name, commit in zip(("v1", "main"), commits, strict=True):
        (folder / "refs" / name).write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return commits


def test_a_revision_is_loaded_recorded_and_named_in_adapters(kept_by_the_hub, tmp_path):
    first, second = kept_by_the_hub
    assert hub_place(find_source("org/model").weights) == ("org/model", second)
    source = find_source("org/model", revision="v1")
    assert hub_place(source.weights) == ("org/model", first)
    config = TrainConfig(model="org/model", revision="v1", adapter="lora").resolved({})
    model = load_model(source, config, precision="no", deepspeed=False, total_steps=1)
    assert model.get_base_model().model.norm.weight[0] == 1
    model.save_pretrained(tmp_path / "lora")
    adapter = json.loads((tmp_path / "lora" / "adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == ("org/model", first)
    assert find_source(str(tmp_path / "lora")).weights == source.weights
    with pytest.raises(UserError, match=r"--model org/model: .*cannot be loaded"):
        find_source("org/model", revision="v2")
    with pytest.raises(UserError, match=r"--revision v1: .*lora is a folder; omit the option"):
        find_source(str(tmp_path / "lora"), revision="v1")
    (problem,) = TrainConfig(revision="v1").problems()
    assert problem.startswith("--revision works only with a hub id in --model")


def test_revision_fetches_no_weights_of_other_libraries(tmp_path, monkeypatch):
    read = {"config.json", "model.safetensors", "pytorch_model.bin"}
    others = {"consolidated.safetensors", "consolidated.00.pth", "original/model.safetensors", "model.gguf"}
    files = dict.fromkeys({*read, *others}, b"{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    with hub("org/model", files) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        folder = Path(find_source("org/model", revision="v1").weights)
    assert {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} == read


def test_resumed_run_loads_the_commit_that_it_began_with(kept_by_the_hub, tmp_path):
    first, second = kept_by_the_hub
    run = RunDir(tmp_path / "run")
    run.final.mkdir(parents=True)
    config = TrainConfig(model="org/model")
    for recorded, commit in (({"model_commit": first}, first), ({}, second), ({"model_commit": second}, second)):
        run.record.write_text(json.dumps({"task": "math", "config": {}, "task_options": {}, **recorded}))
        assert hub_place(source_of(run, "org/model", config).weights) == ("org/model", commit)
    folder = find_source("org/model", revision=first).weights  # named by itself, it has no other commit
    assert source_of(run, folder, TrainConfig(model=folder)).weights == folder


def test_evaluation_on_rows_trained_on_is_warned_of(tmp_path):
    rows, run = [{"prompt": f"{n}?", "completion": "yes"} for n in range(40)], tmp_path / "run"
    (run / "final").mkdir(parents=True)
    files = {"train_file": jsonl(tmp_path / "rows.jsonl", rows), "held_out": 4.0}
    options = {**files, "data_seed": 0}
    (run / "run.json").write_text(json.dumps({"task": "chat", "config": {}, "task_options": options}))
    assert _remembered(Trained(str(run)), "chat", Chat(**files)) == []
    for changed in ({"held_out": 30.0}, {"data_seed": 3}):
        (line,) = _remembered(Trained(str(run)), "chat", Chat(**files | changed))
        assert re.search(r"was trained on \d+ of these (30|4) examples, so the scores show what it memorized", line)
    other = jsonl(tmp_path / "other.jsonl", rows)  # which the record does not name, and must not have read
    assert _remembered(Trained(str(run)), "chat", Chat(train_file=other, held_out=30.0)) == []
    assert _remembered(Trained(str(run)), "math", Chat(**files | {"held_out": 30.0})) == []
