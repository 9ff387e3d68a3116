"""Answers by a vLLM server: scored as all others, each failure in a clear line, and no server left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from conftest import accel_sft
from fake_plugins import install
from models import Sums, make_tiny
from peft import LoraConfig, get_peft_model
from test_laws import layout
from transformers import AutoModelForCausalLM

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.commands import evaluate as judge
from accel_sft.commands import train
from accel_sft.data.chat import Encoded
from accel_sft.evaluation import server, vllm
from accel_sft.io.run_dir import RunDir
from accel_sft.models.load import Source, find_source

QUESTION = Encoded(5, [1, 2, 3, 4], 3)


class Fake:
    """The stand-in on a PATH of its own, and what is known of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        program = folder / "bin" / "vllm"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@"\n')
        program.chmod(0o755)
        self.environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "FAKE_VLLM": str(folder)}

    def told(self, do: str) -> None:
        (self.folder / "do").write_text(do)

    def record(self) -> dict:
        return json.loads((self.folder / "record.json").read_text())

    def after(self, flag: str) -> str:
        words = self.record()["words"]
        return words[words.index(flag) + 1]

    def is_gone(self) -> bool:
        alive = [psutil.Process(pid) for pid in self.record()["pids"] if psutil.pid_exists(pid)]
        return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    (tmp_path / "fake").mkdir()
    made = Fake(tmp_path / "fake")
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(vllm.VARIABLE, raising=False)
    monkeypatch.setattr(server.tempfile, "tempdir", str(tmp_path))
    return made


def answer(source: Source, examples=(QUESTION,), max_new_tokens=4, ends=(0,)):
    accelerator, config = Accelerator(cpu=True), TrainConfig().resolved({})
    sizes = {"max_new_tokens": max_new_tokens, "stop_token_ids": ends}
    return vllm.answer(accelerator, config, source, examples, dtype=torch.float32, **sizes)


# --- what is answered ---


WEIGHING = """
import gc
from dataclasses import dataclass
import torch
from accel_sft_math import Math as Shipped

@dataclass(kw_only=True)
class Weighing(Shipped):
    \"\"\"Math that tells how many numbers this process still held when all answers were there.\"\"\"

    def aggregate(self, scores):
        held = sum(thing.numel() for thing in gc.get_objects() if isinstance(thing, torch.Tensor))
        return {**super().aggregate(scores), "held": float(held)}
"""


def test_two_ranks_score_its_answers_as_the_run_scored_its_own(launched, fake, tmp_path):
    run = layout(launched, "z3")
    (tmp_path / "site").mkdir()
    install(tmp_path / "site", "accel-sft-weighing", "weighing = accel_sft_weighing:Weighing", WEIGHING)
    done = accel_sft(
        *("evaluate", "weighing", "--validation-examples", "7", "--model", str(run.run_dir), "--generate-with", "vllm"),
        yaml="z3",
        launcher=("--mixed_precision", "no"),
        run_dir=tmp_path / "out",
        environment={"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.status == 0, done.output
    assert "vllm: ready after" in done.output
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples-tuned.jsonl").read_text().splitlines()]
    assert samples == RunDir(run.run_dir).read_samples(6)
    expected, result = run.result()["after"], done.result()
    assert result["generate_with"] == "vllm"
    assert result["after"]["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert result["after"]["format_rate"] == expected["format_rate"]
    assert "generate_peak_host_memory_gib" not in result["after"]  # it is another process that generates
    assert result["after"]["held"] < 100_000  # the model, of a million, had made room
    assert (fake.record()["words"][1], fake.after("--dtype")) == (str(run.run_dir / "final"), "float32")
    assert (
        not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & fake.record()["environment"].keys()
    )
    assert fake.is_gone()
    assert (tmp_path / "out" / "vllm.log").exists()


def test_an_adapter_answers_as_it_does_in_peft(fake, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    base = make_tiny(tmp_path / "base")
    torch.manual_seed(0)
    settings = LoraConfig(r=12, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), settings)
    model.save_pretrained(tmp_path / "adapter")
    examples = [Encoded(index, [3 + index, 9, 4, 8], 2 + index % 2) for index in range(5)]
    alone = [
        model.generate(input_ids=torch.tensor([row.input_ids[: row.prompt_length]]), max_new_tokens=6, do_sample=False)
        for row in examples
    ]
    free = [ids[0, row.prompt_length :].tolist() for row, ids in zip(examples, alone, strict=True)]
    end = free[0][2]  # so that at least one answer ends early, and the token that ends it counts
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in free]
    source = find_source(TrainConfig(), str(tmp_path / "adapter"))
    answered, seconds = answer(source, examples, max_new_tokens=6, ends={end})
    assert [row.index for row, _ in answered] == [0, 1, 2, 3, 4]
    assert [ids for _, ids in answered] == expected
    assert len(expected[0]) <= 3
    assert seconds > 0
    assert (fake.after("--max-lora-rank"), fake.after("--max-model-len")) == ("16", "9")
    assert fake.is_gone()
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize(
    ("adapter", "rank"),
    [({"r": 8}, "8"), ({"r": 9, "rank_pattern": {}}, "16"), ({"r": 4, "rank_pattern": {"q_proj": 130}}, "256")],
)
def test_the_largest_rank_of_an_adapter_fits(tmp_path, adapter, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    words = vllm.command("vllm", Source("org/base", "t", str(tmp_path)), 1, torch.bfloat16, 64, True, 0.5)
    assert words[words.index("--max-lora-rank") + 1] == rank
    assert words[words.index("--dtype") + 1] == "bfloat16"
    assert "--trust-remote-code" in words
    assert words[words.index("--gpu-memory-utilization") + 1] == "0.50"


def test_it_takes_of_a_gpu_what_is_free_at_most():
    assert vllm.memory_share(free=80, total=80) == 0.9
    assert vllm.memory_share(free=40, total=80) == pytest.approx(0.47)


# --- what is refused ---


def test_training_refuses_it_with_the_way_out():
    with pytest.raises(UserError, match="accel-sft evaluate sums --model RUN --generate-with vllm"):
        train.run("sums", Sums(), TrainConfig(generate_with="vllm"))


def test_an_adapter_it_cannot_serve_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "ADALORA", "base_model_name_or_path": "org/base"}')
    config = TrainConfig(model=str(tmp_path), generate_with="vllm")
    with pytest.raises(UserError, match=r"it serves LoRA adapters, and .* is ADALORA"):
        judge.run("sums", Sums(), config)


def test_a_missing_vllm_is_told_how_to_get_before_anything_is_loaded(tmp_path):
    base = make_tiny(tmp_path / "base")
    arguments = ("evaluate", "math", "--model", str(base), "--generate-with", "vllm", "--dry-run")
    refused = accel_sft(*arguments, environment={"PATH": "/usr/bin:/bin", vllm.VARIABLE: ""})
    assert refused.status == 1
    (line,) = [line for line in refused.output.splitlines() if line.startswith("Error")]
    assert "pip install vllm) and name it: export ACCEL_SFT_VLLM=" in line


def test_the_program_may_be_named(fake, tmp_path, monkeypatch):
    assert vllm.find_program() == str(fake.folder / "bin" / "vllm")
    monkeypatch.setenv(vllm.VARIABLE, sys.executable)
    assert vllm.find_program() == sys.executable
    monkeypatch.setenv(vllm.VARIABLE, str(tmp_path / "none"))
    with pytest.raises(UserError, match=f"ACCEL_SFT_VLLM={tmp_path}/none is no program"):
        vllm.find_program()


# --- what goes wrong, and what is left ---


@pytest.mark.parametrize(
    ("do", "messages"),
    [
        ("die", ["ended with status 3 before it was ready", "ValueError: too little memory", "trace 29"]),
        ("linger", ["was not ready after 1 s"]),
        ("refuse", ["validation example 5 with HTTP status 400: this prompt is not for me"]),
        ("vanish", ["ended with status 9 while it answered", "RuntimeError: the engine is dead"]),
        ("be-old", ["no token ids with its answers"]),
    ],
)
def test_a_failure_is_told_with_the_end_of_the_log(fake, tmp_path, monkeypatch, do, messages):
    if do == "linger":
        monkeypatch.setattr(server, "START_SECONDS", 1.0)
    fake.told(do)
    with pytest.raises(UserError) as caught:
        answer(Source(str(tmp_path), str(tmp_path)), [QUESTION] * 3)
    (told,) = caught.value.problems
    assert all(message in told for message in messages)
    assert "trace 5" not in told
    (log,) = tmp_path.glob("accel-sft-vllm-*.log")
    assert str(log) in told
    assert fake.is_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_goes_with_the_evaluation(launched, fake, number):
    run = layout(launched, "plain").run_dir
    fake.told("be-silent")
    words = ["evaluate", "math", "--model", str(run), "--validation-examples", "7", "--generate-with", "vllm"]
    evaluation = subprocess.Popen([sys.executable, "-m", "accel_sft", *words], stderr=subprocess.PIPE, text=True)
    wait_for((fake.folder / "asked.json").exists)
    assert not fake.is_gone()
    evaluation.send_signal(number)
    _, errors = evaluation.communicate(timeout=30)
    assert evaluation.returncode == (130 if number == signal.SIGINT else -number), errors
    assert "Traceback" not in errors
    wait_for(fake.is_gone, seconds=15)


def wait_for(come_true, seconds=120):
    until = time.monotonic() + seconds
    while not come_true():
        assert time.monotonic() < until
        time.sleep(0.1)
