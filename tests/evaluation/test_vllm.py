"""Answers by vLLM: scored as all others, each failure in a clear message, and no process left behind."""

from __future__ import annotations

import json
import os
import re
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
from places import SUPPORT
from reference_job import layout
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.batching.layouts import Batching
from accel_sft.chat.encoded import Encoded
from accel_sft.commands import evaluate as evaluate_command
from accel_sft.commands import train
from accel_sft.evaluation import vllm, vllm_process
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.io.run_dir import RunDir
from accel_sft.models.source import Source, find_source

QUESTION = Encoded(5, [1, 2, 3, 4], 3)


class Fake:
    """An environment with the stand-in for vLLM, and what is known of its process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir(parents=True)
        package = folder / "site" / "vllm"
        (package / "lora").mkdir(parents=True)
        (package / "__init__.py").write_text((SUPPORT / "fake_vllm.py").read_text())
        (package / "lora" / "request.py").write_text(
            "class LoRARequest:\n"
            "    def __init__(self, lora_name, lora_int_id, lora_path):\n"
            "        self.lora_path = lora_path\n"
        )
        python = f'#!/bin/sh\nPYTHONPATH={folder / "site"} exec {sys.executable} "$@"\n'
        for name, text in (("vllm", "#!/bin/sh\nexit 7\n"), ("python", python)):
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        self.environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "FAKE_VLLM": str(folder)}

    def set_behaviour(self, do: str) -> None:
        (self.folder / "do").write_text(do)

    def record(self) -> dict:
        return json.loads((self.folder / "record.json").read_text())

    def is_gone(self) -> bool:
        alive = [psutil.Process(pid) for pid in self.record()["pids"] if psutil.pid_exists(pid)]
        return all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    made = Fake(tmp_path / "fake")
    monkeypatch.setenv("FAKE_VLLM", str(made.folder))
    monkeypatch.setenv(vllm.PROGRAM, str(made.folder / "bin" / "vllm"))
    monkeypatch.delenv(vllm.OPTIONS, raising=False)
    monkeypatch.setattr(vllm_process.tempfile, "tempdir", str(tmp_path))
    return made


def backend(source: Source, ends=(0,)):
    accelerator = Accelerator(cpu=True)
    return vllm.VllmBackend(accelerator, source, torch.float32, ends, output_dir=None, trust_remote_code=False)


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
    own = str(run.run_dir / "final")  # whose numbers are the run's own
    done = accel_sft(
        *("evaluate", "weighing", "--validation-examples", "7", "--model", own, "--generate-with", "vllm"),
        yaml="z3",
        launcher=("--mixed_precision", "no"),
        run_dir=tmp_path / "out",
        environment={"PYTHONPATH": f"{tmp_path / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    assert done.status == 0, done.output
    assert re.search(r"vllm: 7 answers in \d", done.output)
    samples = [json.loads(line) for line in (tmp_path / "out" / "samples-tuned.jsonl").read_text().splitlines()]
    assert samples == RunDir(run.run_dir).read_samples(6)
    expected, result = run.result()["after"], done.result()
    assert result["generate_with"] == "vllm"
    assert result["after"]["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-4)
    assert result["after"]["format_rate"] == expected["format_rate"]
    assert result["after"].keys() >= expected.keys()  # speed and peaks of generation too
    assert result["after"]["generate_peak_host_memory_gib"] > 0.1  # of the script, which loads torch
    assert result["after"]["held"] < 100_000  # the model, of a million, had been released
    record = fake.record()
    assert (record["arguments"]["model"], record["arguments"]["dtype"]) == (own, "float32")
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & record["environment"].keys()
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
    source = find_source(str(tmp_path / "adapter"))
    generated = backend(source, ends={end})(examples, 6)
    assert [row.index for row, _ in generated.answers] == [0, 1, 2, 3, 4]
    assert [ids for _, ids in generated.answers] == expected
    assert len(expected[0]) <= 3
    assert generated.seconds > 0
    arguments = fake.record()["arguments"]
    assert (arguments["max_lora_rank"], arguments["max_model_len"]) == (16, 9)
    assert fake.is_gone()
    assert not list(tmp_path.glob("*.log"))


@pytest.mark.parametrize(
    ("adapter", "rank"),
    [({"r": 8}, 8), ({"r": 9, "rank_pattern": {}}, 16), ({"r": 4, "rank_pattern": {"q_proj": 130}}, 256)],
)
def test_the_largest_rank_of_an_adapter_fits(tmp_path, adapter, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    arguments = vllm.llm_arguments(Source("org/base", "t", str(tmp_path)), torch.bfloat16, 64, True, 0.4712)
    assert arguments["max_lora_rank"] == rank
    assert arguments["dtype"] == "bfloat16"
    assert arguments["trust_remote_code"] is True
    assert arguments["gpu_memory_utilization"] == 0.47


def test_options_of_the_environment_come_last(monkeypatch):
    monkeypatch.setenv(vllm.OPTIONS, '{"tensor_parallel_size": 2, "gpu_memory_utilization": 0.3}')
    arguments = vllm.llm_arguments(Source("org/base", "t"), torch.bfloat16, 64, share=0.9)
    assert (arguments["tensor_parallel_size"], arguments["gpu_memory_utilization"]) == (2, 0.3)


@pytest.mark.parametrize(("text", "message"), [("{", "not JSON"), ("[1]", "arguments of vllm.LLM as JSON, such as")])
def test_options_that_are_no_json_object_are_refused(monkeypatch, text, message):
    monkeypatch.setenv(vllm.OPTIONS, text)
    with pytest.raises(UserError, match=message):
        vllm.check(Source("org/base", "t"))


def test_it_takes_of_a_gpu_what_is_free_at_most():
    assert vllm.memory_share(free=80, total=80) == 0.9
    assert vllm.memory_share(free=40, total=80) == pytest.approx(0.47)


@pytest.mark.parametrize("free", [0, 1, 2])
def test_a_gpu_without_free_memory_is_refused(free):
    with pytest.raises(UserError, match=f"only {free}.0 of the GPU's 80.0 GiB are free; end the other processes"):
        vllm.memory_share(free=free * 2**30, total=80 * 2**30)


# --- what is refused ---


def test_training_refuses_it_with_the_way_out():
    with pytest.raises(UserError, match="accel-sft evaluate sums --model RUN --generate-with vllm"):
        train.run("sums", Sums(), TrainConfig(generate_with="vllm"))


def test_an_adapter_it_cannot_serve_is_refused_before_anything_is_loaded(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "ADALORA", "base_model_name_or_path": "org/base"}')
    config = EvaluateConfig(model=str(tmp_path), generate_with="vllm")
    with pytest.raises(UserError, match=r"vLLM serves only LoRA, but .* is ADALORA"):
        evaluate_command.run("sums", Sums(), config)


@pytest.mark.parametrize("served", ["adapter", "base"])
def test_a_template_for_the_adapter_or_for_the_base_beside_it_is_refused_too(tmp_path, monkeypatch, served):
    base, adapter = make_tiny(tmp_path / "base"), tmp_path / "adapter"
    adapter.mkdir()
    about = {"peft_type": "LORA", "base_model_name_or_path": str(base)}
    (adapter / "adapter_config.json").write_text(json.dumps(about))
    if served == "base":
        check = vllm.check
        monkeypatch.setattr(vllm, "check", lambda source: None if source.adapter else check(source))
    more = {"base": str(base)} if served == "base" else {}
    config = EvaluateConfig(model=str(adapter), generate_with="vllm", chat_template="chatml", **more)
    with pytest.raises(UserError, match="without embeddings of tokens that --chat-template added"):
        evaluate_command.run("sums", Sums(), config)


def test_a_missing_vllm_s_message_says_how_to_get_it_before_anything_is_loaded(tmp_path):
    base = make_tiny(tmp_path / "base")
    arguments = ("evaluate", "math", "--model", str(base), "--generate-with", "vllm", "--dry-run")
    refused = accel_sft(*arguments, environment={"PATH": "/usr/bin:/bin", vllm.PROGRAM: ""})
    assert refused.status == 1
    (line,) = [line for line in refused.output.splitlines() if line.startswith("Error")]
    assert "pip install vllm) and name it: export ACCEL_SFT_VLLM=" in line


def test_the_program_may_be_named(fake, tmp_path, monkeypatch):
    python = str(fake.folder / "bin" / "python")
    assert vllm.find_python() == python
    (tmp_path / "link").symlink_to(fake.folder / "bin" / "vllm")  # as other installers make them
    monkeypatch.setenv(vllm.PROGRAM, str(tmp_path / "link"))
    assert vllm.find_python() == python
    monkeypatch.setenv(vllm.PROGRAM, python)
    assert vllm.find_python() == python
    monkeypatch.delenv(vllm.PROGRAM)
    monkeypatch.setenv("PATH", str(fake.folder / "bin"))
    assert vllm.find_python() == python
    monkeypatch.setenv(vllm.PROGRAM, str(tmp_path / "none"))
    with pytest.raises(UserError, match=f"ACCEL_SFT_VLLM={tmp_path}/none cannot be run"):
        vllm.find_python()
    script = tmp_path / "with-options"
    script.write_text('#!/bin/sh\nexec vllm "$@" --tensor-parallel-size 2\n')
    script.chmod(0o755)
    monkeypatch.setenv(vllm.PROGRAM, str(script))
    with pytest.raises(UserError, match=r"is neither vLLM's `vllm` nor its `python`: .* ACCEL_SFT_VLLM_OPTIONS"):
        vllm.find_python()
    (fake.folder / "bin" / "python").unlink()
    monkeypatch.setenv(vllm.PROGRAM, str(fake.folder / "bin" / "vllm"))
    with pytest.raises(UserError, match="there is no python beside"):
        vllm.find_python()


# --- what goes wrong, and what is left ---


@pytest.mark.parametrize(
    ("do", "messages"),
    [
        ("die", ["ended with status 3", "ValueError: too little memory", "trace 29"]),
        ("vanish", ["ended with status 9", "    progress 20%", "RuntimeError: the engine is dead"]),
        ("cut", ["wrote no usable answers", "3 prompts, and not as many answers"]),
        ("babble", ["wrote no usable answers", "answer 0: expected 1 to 4 token ids, got [1.5]"]),
    ],
)
def test_a_failure_is_shown_with_the_end_of_the_log(fake, tmp_path, do, messages):
    fake.set_behaviour(do)
    with pytest.raises(UserError) as caught:
        backend(Source(str(tmp_path), str(tmp_path)))([QUESTION] * 3, 4)
    (message,) = caught.value.problems
    assert all(part in message for part in messages), message
    assert "trace 5" not in message
    assert "progress 10%" not in message
    (log,) = tmp_path.glob("accel-sft-vllm-*.log")
    assert str(log) in message
    assert fake.is_gone()


@pytest.mark.parametrize("answers", [[[]], [[1] * 5], [[-1]], [[True]], ["11"], {"0": [1]}, None])
def test_what_are_no_answers_is_refused(answers):
    with pytest.raises(ValueError, match="answer"):
        vllm_process._check(answers, 1, 4)
    vllm_process._check([[1, 2, 3, 4]], 1, 4)


@pytest.mark.parametrize(("do", "moves"), [("work", True), ("hang", False)])
def test_the_script_s_work_is_a_heartbeat_and_its_sleep_is_none(fake, tmp_path, monkeypatch, do, moves):
    fake.set_behaviour(do)
    code = f"""
import threading, time
from pathlib import Path
from accel_sft.io.heartbeat import heartbeat_count
def look():
    while not Path({str(fake.folder / "asked")!r}).exists():
        time.sleep(0.1)
    time.sleep(2)
    before = heartbeat_count()
    time.sleep(2)
    print("heartbeats", heartbeat_count() - before, flush=True)
    import os; os._exit(0)
threading.Thread(target=look).start()
import test_vllm
from accel_sft.models.source import Source
test_vllm.backend(Source("m", "m"))([test_vllm.QUESTION], 4)
"""
    folders = (SUPPORT.parent, SUPPORT, Path(__file__).parent, os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(map(str, folders))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    count = re.search(r"heartbeats (\d+)", done.stdout)
    assert count, done.stderr
    assert (int(count[1]) > 0) == moves
    wait_for(fake.is_gone, seconds=15)


def test_a_loss_without_memory_has_its_message_with_vllm_too(tmp_path):
    def full(**_):
        raise torch.OutOfMemoryError("no room")

    base = make_tiny(tmp_path / "base")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    model.forward = full
    config = TrainConfig().resolved({})
    evaluator = Evaluator(Accelerator(cpu=True), tokenizer, Sums(), [], [QUESTION], config, backend(Source("m", "m")))
    with pytest.raises(UserError, match=r"evaluation: out of device memory \(no room\); lower --max-length"):
        evaluator.loss(model, Batching("shared", 256))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_vllm_goes_with_the_evaluation(launched, fake, number):
    run = layout(launched, "plain").run_dir
    fake.set_behaviour("hang")
    words = ["evaluate", "math", "--model", str(run), "--validation-examples", "7", "--generate-with", "vllm"]
    evaluation = subprocess.Popen([sys.executable, "-m", "accel_sft", *words], stderr=subprocess.PIPE, text=True)
    wait_for((fake.folder / "asked").exists)
    assert not fake.is_gone()
    evaluation.send_signal(number)
    _, errors = evaluation.communicate(timeout=30)
    assert evaluation.returncode == (130 if number == signal.SIGINT else -number), errors
    assert "Traceback" not in errors
    wait_for(fake.is_gone, seconds=15)


def test_vllm_that_makes_no_progress_ends_the_evaluation_and_itself(launched, fake):
    run = layout(launched, "plain").run_dir
    fake.set_behaviour("hang")
    words = ["evaluate", "math", "--model", str(run), "--validation-examples", "7", "--generate-with", "vllm"]
    done = accel_sft(*words, "--hang-timeout", "8")
    assert done.status == 1, done.output
    assert re.search(
        r"nothing has moved for \d+ seconds \(--hang-timeout\): rank 0 is stuck in .*(vllm_process|activity)",
        done.output,
    )
    assert (fake.folder / "asked").exists()
    wait_for(fake.is_gone, seconds=15)


def wait_for(come_true, seconds=120):
    until = time.monotonic() + seconds
    while not come_true():
        assert time.monotonic() < until
        time.sleep(0.1)
