"""`parity`: each fault that a server may have is named, and none of them on a server that is faithful."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import accel_sft, finished
from limits import wait_for
from served_model import Served, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft.chat.encoded import Encoded
from accel_sft.evaluation.endpoint import Reply
from accel_sft.models.tiny import CHAT_TEMPLATE, build_tiny, texts_of
from accel_sft.tools.parity import command, comparison
from accel_sft.tools.parity.comparison import Pair, same, with_thinking
from accel_sft_math import Math

DATA = {"train_examples": 1500, "validation_examples": 12}
TRAINED = ("--train-examples", "1500", "--validation-examples", "12", "--max-steps", "60", "--global-batch-size", "16")
TRAINED += ("--learning-rate", "4e-3", "--eval-every", "off", "--save-every", "off", "--max-new-tokens", "24")
OTHER_TEMPLATE = "<s>" + CHAT_TEMPLATE.replace("assistant\n", "model\n")
ASKED = {"model": None, "examples": 6, "same_data": False, "task": None, "key_from": None, "timeout": 60}
ASKED |= {"trust_remote_code": False, "debug": False}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run on a base whose template begins with a token that many tokenizers add themselves."""
    folder = tmp_path_factory.mktemp("parity")
    task = Math(**DATA)
    build_tiny(folder / "base", texts_of(task, task.dataset("train")), 0)
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = "<s>" + CHAT_TEMPLATE
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size))
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return finished("math", "--model", str(folder / "base"), *TRAINED, run_dir=folder / "run").run_dir


FAULTS = {
    "faithful": ({}, None),
    "template": ({"template": OTHER_TEMPLATE}, comparison.TEMPLATE),
    "first token": ({"double_first": True}, comparison.TEMPLATE),
    "other weights": ({"model": "base"}, comparison.OTHER),
    "stop token": ({"ends": False}, comparison.STOP),
    "sampling": ({"draws": True}, comparison.OTHER),
    "context": ({"context": 12}, comparison.CONTEXT),
    "bf16": ({"dtype": torch.bfloat16}, None),
}
"""What is planted in the server, and the cause that is to be named."""
OFTEN = ("faithful", "template", "other weights", "stop token", "context")
CASES = [
    pytest.param(form, fault, id=f"{form}-{fault}", marks=() if form == "vllm" and fault in OFTEN else pytest.mark.long)
    for form in ("vllm", "llama", "plain")
    for fault in FAULTS
]


def served_with(run, form, model="run/final", dtype=torch.float32, **planted):
    weights = AutoModelForCausalLM.from_pretrained(run.parent / model, dtype=dtype).float()
    return Served(weights.eval(), AutoTokenizer.from_pretrained(run / "final"), form=form, **planted)


@pytest.mark.parametrize(("form", "fault"), CASES)
def test_a_fault_is_named_and_no_other(run, fault, form):
    planted, named = FAULTS[fault]
    with serving(served_with(run, form, **planted)) as url:
        result = command.compared(str(run), {**ASKED, "url": url})
    text = "\n".join(command.lines(result))
    if fault == "bf16" and result["answers"]["other"]:
        named = comparison.OTHER
    assert (result["cause"] and result["cause"]["cause"]) == named, text
    assert result["holds"] == (not named and result["answers"]["other"] == 0), text
    if form != "plain" and fault in ("faithful", "bf16"):
        fewer_bits = "more than float32 explains: the server has fewer bits" in text
        assert fewer_bits == (fault == "bf16"), text
    if fault == "faithful":
        assert result["metric"]["here"] == result["metric"]["served"]
        assert (result["log_probabilities"] is None) == (form == "plain")
        assert result["answers"] == {"same": 6, "near_ties": 0, "other": 0}
        assert form == "plain" or result["log_probabilities"]["largest"] < 1e-4


@pytest.mark.long
def test_nothing_differs_on_a_real_server(run, tmp_path):
    program = shutil.which(os.environ.get("VLLM", "vllm"))
    if not program:
        pytest.skip("no vllm on PATH, nor in $VLLM")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ["serve", str(run), "--program", program, "--port", str(port), "--name", "m"]
    # vLLM compiles with what is beside its program, and would reserve most of the machine's memory
    env = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "PATH": f"{Path(program).parent}:{os.environ['PATH']}"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([sys.executable, "-m", "accel_sft", *words], stdout=log, stderr=log, env=env)

    def listens():
        assert server.poll() is None, (tmp_path / "log").read_text()
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
            return True

    try:
        wait_for(listens, 300)
        result = command.compared(str(run), {**ASKED, "url": f"http://127.0.0.1:{port}/v1", "model": "m"})
    finally:
        server.terminate()
        server.wait()
    assert result["holds"], command.lines(result)
    assert result["metric"]["here"] == result["metric"]["served"]


def test_answers_of_the_base_show_a_missing_adapter(run):
    folder = run.parent / "adapted"
    finished("math", "--model", str(run.parent / "base"), *TRAINED, "--adapter", "lora", run_dir=folder)
    with serving(served_with(run, "vllm", model="base")) as url:
        cause = command.compared(str(folder), {**ASKED, "url": url})["cause"]
    assert cause["cause"] == comparison.WEIGHTS
    assert "differing answers are those of the model before training" in cause["evidence"]


def test_command_ends_with_a_status_and_refuses_the_incomparable(run, tmp_path, called):
    with serving(served_with(run, "vllm", ends=False)) as url:
        done = accel_sft("parity", str(run), "--url", url, "--examples", "3")
    assert done.status == 1, done.output
    assert "prompts  3 of 3 are those of training, compared token by token\n" in done.output
    line = r"cause    stop token: example \d: the server's answer continues after '<\|im_end\|>', as the"
    assert re.search(line, done.output)
    assert "differs  the server's answers are not the run's\n" in done.output
    record = json.loads((run / "run.json").read_text())
    record["task_options"]["validation_file"] = "/etc/passwd"
    (tmp_path / "named" / "final").mkdir(parents=True)
    (tmp_path / "named" / "run.json").write_text(json.dumps(record))
    for folder, options, line in (
        (tmp_path, (), f"RUN {tmp_path}: no run.json there"),
        (run, ("--model", "tuned"), "cannot be reached"),
        (run, ("--task", "chat"), f"--task chat: {run} was trained for math; name that"),
        (tmp_path / "named", (), "its record names files, which are read only if you ask for that; add --same-data"),
    ):
        refused = called("parity", str(folder), "--url", url, *options)
        assert refused.status == 1
        assert line in " ".join(refused.output.split())


def test_refusal_counts_as_context_unless_longer_prompts_were_answered():
    def cause(*refused):
        pairs = [Pair(None, Encoded(0, [1] * n, n), [2], refusal="no system turn") for n in refused]
        answered = Pair(None, Encoded(0, [1] * 5, 5), [2], Reply("a", "stop"))
        return comparison.cause_of(None, None, [*pairs, answered])

    assert cause(9)[:2] == (comparison.CONTEXT, "the server refused 1 example: no system turn")
    assert cause(4, 9)[:2] == (comparison.OTHER, "the server refused 2 examples: no system turn")


def test_left_out_thinking_and_split_characters_are_no_differences():
    thought = "<think>\n\n</think>\n\n"
    for own, served, answer in ((f"{thought}42", "42", f"{thought}42"), ("<think>\na", "", "<think>\na")):
        assert with_thinking(served, own) == answer
    assert with_thinking("41", f"{thought}42") == with_thinking(f"{thought}41", f"{thought}42") == f"{thought}41"
    assert with_thinking("41", "42") == "41"
    cut = SimpleNamespace(ends={0}, most=2, text=lambda ids: "ab\ufffd")
    assert same(cut, [1], Reply("ab", "length"))
    assert not same(cut, [1], Reply("abc", "length"))
    assert same(cut, [1, 0], Reply("ab", "length"))  # the token that ended it was the last that was asked for
    assert not same(cut, [0], Reply("ab", "length"))


def test_the_same_answers_with_another_metric_do_not_hold():
    def lead(at, served):
        pair = Pair(None, Encoded(0, [1], 1), [2], Reply("assistant\nyes", "stop"), at=at)
        return comparison.lead([pair], "exact_match", 1.0, served)

    assert lead(None, 0.0).evidence.startswith(
        "the same answers have exact_match 1 here and 0 as the server returns them"
    )
    assert lead(None, 1.0) is lead(0, 0.0) is lead(None, float("nan")) is None
