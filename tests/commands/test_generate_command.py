"""`accel-sft generate`: what a run answered while it was evaluated, prompts of one's own, a talk at the terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from conftest import accel_sft, finished
from families import FAMILIES
from limits import limit
from reference_job import layout
from transformers import AutoModelForCausalLM, AutoTokenizer
from weights import answerer

from accel_sft import UserError
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.chat.conversation import Conversation
from accel_sft.commands.trained import Trained
from accel_sft.evaluation.answerer import Prompt
from accel_sft.evaluation.generate import Sampling
from accel_sft.evaluation.prompts import read_prompts
from accel_sft.io.run_dir import RunDir

QUESTION = [{"role": "user", "content": "31="}]


@pytest.fixture(scope="module")
def run(launched):
    return layout(launched, "plain")


def test_prompts_file_is_answered_as_in_the_run(run, called, tmp_path):
    before, after = (
        [json.loads(line) for line in (run.run_dir / f"samples/step-{step:06d}.jsonl").read_text().splitlines()]
        for step in (0, 6)
    )
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": sample["prompt"]}) + "\n" for sample in after))
    files = ("--file", str(prompts), "--output", str(output))
    done = finished("generate", str(run.run_dir / "final"), *files, "--base", "auto")
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["generated"] for row in rows] == [sample["generated"] for sample in after]
    assert [row["base"] for row in rows] == [sample["generated"] for sample in before]
    system = json.loads((run.run_dir / "run.json").read_text())["system_prompt"]
    assert [turn["content"] for turn in rows[0]["messages"]] == [system, after[0]["prompt"]]
    assert f"{output}: 7 answers" in done.output
    assert "already exists; name a new file" in called("generate", str(run.run_dir), *files).output


def test_prompt_is_answered_by_the_best_weights(run):
    sample = json.loads((run.run_dir / "samples/step-000006.jsonl").read_text().splitlines()[0])
    done = finished("generate", str(run.run_dir), sample["prompt"])
    assert f"model  {run.run_dir / 'best'}\n" in done.output
    assert f"note: using this run's best/ weights; for the weights of its last step, name {run.run_dir}" in done.output


def test_best_weights_are_taken_or_else_the_last(tmp_path):
    record = {"task": "math", "config": {}, "task_options": {}}
    (tmp_path / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="neither best/ nor final/"):
        RunDir.weights_in(str(tmp_path))
    for name in ("final", "best"):
        (tmp_path / name).mkdir()
        assert RunDir.weights_in(str(tmp_path)) == str(tmp_path / name)
    assert RunDir.choice_in("org/model") == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "give one of these: a PROMPT, --file FILE, or --interactive"),
        ((" ",), "PROMPT is empty"),
        (("5=", "--output", "a.jsonl"), "--file and --output go together"),
        (("5=", "--top-p", "0.5"), "--top-p needs --temperature above 0"),
        (("5=", "--thinking", "much"), "--thinking much: not one of off, template, keep"),
        (("5=", "--base", "auto"), "is neither from a run nor an adapter; name its base"),
        (("5=", "--max-new-tokens", "5000"), "exceed the model's limit of 4,096"),
    ],
)
def test_what_cannot_be_answered_is_one_line(tiny, called, arguments, problem):
    failed = called("generate", str(tiny), *arguments)
    assert failed.status == 1
    assert problem in failed.output
    assert "Traceback" not in failed.output


def test_settings_that_are_not_given_are_the_runs_own(tmp_path):
    (tmp_path / "best").mkdir()
    config = {"thinking": "off", "max_length": 99, "load_in_4bit": True}  # which has no --adapter beside it here
    record = {"task": "math", "config": config, "task_options": {}, "max_new_tokens": 7}
    (tmp_path / "run.json").write_text(json.dumps(record))
    trained = Trained(str(tmp_path))
    given = EvaluateConfig(model=trained.weights, max_length=5)
    settings = trained.settings(given)
    assert (settings.thinking, settings.max_length, settings.max_new_tokens) == ("off", 5, 7)
    assert (settings.template_date, trained.in_4bit) == (time.strftime("%Y-%m-%d"), True)
    (tmp_path / "run.json").write_text(json.dumps(record | {"config": {"thinking": "much"}}))
    with pytest.raises(UserError, match=r"--thinking much: not one of .*; the value is from the run\.json of "):
        Trained(str(tmp_path)).settings(given)


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory):
    """A run of a base with a tokenizer.model whose weights are in bf16, and a copy of its final/ without the run."""
    folder = tmp_path_factory.mktemp("exported")
    shutil.copytree(tiny, folder / "base")
    (folder / "base" / "tokenizer.model").write_bytes(b"pieces")
    rows = [{"prompt": f"{number}=", "completion": "2+3"} for number in range(20)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--model", str(folder / "base"), "--train-file", str(folder / "rows.jsonl"), "--max-steps", "1")
    words += ("--eval-every", "off", "--save-every", "off", "--dtype", "bfloat16")
    words += ("--thinking", "off", "--system-prompt", "As a pirate:\n---\nyes")
    run = finished("chat", *words, run_dir=folder / "run")
    shutil.copytree(run.run_dir / "final", folder / "copied")
    return run, folder / "copied"


def test_copied_weights_are_asked_as_in_their_run(exported, called):
    run, copied = exported
    assert (copied / "tokenizer.model").read_bytes() == b"pieces"
    assert "--dtype bfloat16: 16-bit weights lose small updates; leave" in " ".join(run.output.split())
    (mine, theirs) = (Trained(str(folder)) for folder in (copied, run.run_dir))
    config = EvaluateConfig(model=str(copied))
    assert mine.settings(config) == theirs.settings(config)
    assert mine.settings(config).thinking == "off"
    assert mine.record["system_prompt"] == theirs.record["system_prompt"] == "As a pirate:\n---\nyes"
    assert (mine.precision, mine.raw_text) == (theirs.precision, theirs.raw_text)
    files = ("--validation-file", str(copied.parent / "rows.jsonl"))
    shown = called("evaluate", "chat", "--model", str(copied), *files, "--dry-run")
    assert "thinking off" in shown.output
    assert "system-prompt As a pirate:" in shown.output
    refused = called("evaluate", "chat", "--model", str(copied), "--same-data", "--dry-run")
    assert f"--same-data: --model {copied} is not a run of chat" in refused.output


def test_several_ranks_are_refused(tiny):
    failed = accel_sft("generate", str(tiny), "5=", environment={"WORLD_SIZE": "2", "RANK": "0"})
    assert "generate runs in one process" in failed.output


def test_prompts_are_lines_or_rows_and_bad_ones_are_named(tmp_path):
    lines, rows = tmp_path / "lines.txt", tmp_path / "rows.jsonl"
    lines.write_text("5=\n\n  6= \n")
    system = {"role": "system", "content": "Sum."}
    assert read_prompts(str(lines), "Sum.") == (
        [([system, {"role": "user", "content": turns}], (), None) for turns in ("5=", "6=")],
        [f"{lines}:1", f"{lines}:3"],
    )
    own = [{"role": "system", "content": "Own."}, *QUESTION]
    rows.write_text(json.dumps({"messages": own}) + "\n" + json.dumps({"prompt": "7="}))
    turns = [system, {"role": "user", "content": "7="}]
    assert read_prompts(str(rows), "Sum.")[0] == [(own, (), None), (turns, (), None)]
    for content, problem in ((b"\n", "it has no prompts"), (b"\xff", "not UTF-8")):
        lines.write_bytes(content)
        with pytest.raises(UserError, match=problem):
            read_prompts(str(lines), None)


def test_tools_and_calls_of_rows_are_asked_as_in_training(tiny, tmp_path):
    schema = {"name": "weather", "parameters": {"town": {"type": "string"}}}
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "dry<|im_end|>", "tool_call_id": "a"},
    ]
    rows = [{"messages": turns, "tools": tools, "system": "S."} for tools in ([schema], json.dumps([schema]))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (one, other), _ = read_prompts(str(tmp_path / "rows.jsonl"), "not this")
    assert one == other
    assert one.tools == [{"type": "function", "function": schema}]
    assert [turn["role"] for turn in one.turns] == ["system", "user", "assistant", "tool"]
    assert one.turns[2]["tool_calls"][0]["function"]["arguments"] == {"town": "Ulm"}
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TOOLS
    tokenizer.save_pretrained(shutil.copytree(tiny, tmp_path / "base"))
    mine = answerer(tmp_path / "base")
    trained = Conversation(one.turns, {"role": "assistant", "content": "No."}, tools=one.tools)
    prompt = mine.encode(one, 8).input_ids[:-1]
    assert prompt == mine.rendering.control.ids([mine.rendering.examples([trained], "train")[0].prompt])[0]
    assert '"town": {' in tokenizer.decode(prompt)
    assert 'weather {"town": "Ulm"}' in tokenizer.decode(prompt)
    assert mine.answers([one], 8)[0].tokens


TOOLS = (
    "{{ tools | tojson }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({}, "field 'prompt'"),
        ({"messages": 3}, 'a list of {"role"'),
        ({"messages": [*QUESTION, {"role": "assistant", "content": "3"}]}, "a last turn whose role is not assistant"),
        ({"prompt": "?", "tools": "{"}, "a list of schemas, or its JSON text"),
        ({"prompt": "?", "system": 3}, "field 'system'"),
        ({"prompt": "?", "chat_template_kwargs": {"a": 1}}, "no value: only training"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, *QUESTION]}, "gave the call '{}', expected"),
        ({"prompt": "?", "images": ["a.png"]}, "give images with --image and a single PROMPT"),
        ({"messages": [{"role": "user", "content": "?", "function_call": {"name": "a"}}]}, "not in `function_call`"),
    ],
)
def test_row_that_cannot_be_asked_is_refused_by_place(tmp_path, row, problem):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(UserError, match=r"rows\.jsonl:1.*" + re.escape(problem)):
        read_prompts(str(tmp_path / "rows.jsonl"), None)


def test_drawn_answers_follow_the_seed_and_top_1_is_greedy(tiny):
    chats = [Prompt([{"role": "user", "content": f"{number}="}]) for number in range(5)]
    greedy = answerer(tiny).answers(chats, 8)
    assert answerer(tiny, Sampling(temperature=3.0, top_k=1)).answers(chats, 8) == greedy
    written = []
    assert answerer(tiny).stream(chats[0].turns, 8, written.append) == greedy[0]
    assert "".join(written) == greedy[0].text
    drawing, drawn = answerer(tiny, Sampling(temperature=3.0)), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        drawn.append(drawing.answers(chats, 8))
    assert drawn[0] == drawn[1] != drawn[2]
    assert "because tokens are sampled" in drawing.generator.message


@pytest.mark.parametrize(("thinking", "end"), [("off", "</think>\n\n"), ("template", "<think>\n")])
def test_thinking_is_opened_or_closed_as_in_training(tiny, tmp_path, thinking, end):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = FAMILIES["Qwen3.5"].template
    tokenizer.save_pretrained(shutil.copytree(tiny, tmp_path / "model"))
    encoded = answerer(tmp_path / "model", thinking=thinking).encode(Prompt(QUESTION), 5)
    assert tokenizer.decode(encoded.input_ids[: encoded.prompt_length]).endswith(end)


def test_left_out_penalties_of_the_base_are_named(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "model")
    settings = json.loads((folder / "generation_config.json").read_text())
    settings |= {"repetition_penalty": 1.1, "no_repeat_ngram_size": 3}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    (note,) = answerer(folder).notes
    assert "generation_config.json (repetition_penalty, no_repeat_ngram_size) are not applied" in note
    (note,) = answerer(folder, Sampling(repetition_penalty=1.3)).notes
    assert "generation_config.json (no_repeat_ngram_size)" in note
    assert answerer(tiny).notes == []


@pytest.fixture
def endless(tiny, tmp_path):
    """A model that says one blank after the other: all embeddings are one vector, that of the blank twice as long."""
    folder = tmp_path / "endless"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        embedding.copy_(100 * embedding[0].expand_as(embedding))
        embedding[tokenizer.convert_tokens_to_ids("Ġ")] *= 2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_a_talk_streams_remembers_is_interrupted_and_begins_anew(endless):
    terminal, inner = pty.openpty()
    command = [sys.executable, "-m", "accel_sft", "generate", str(endless), "--interactive", "--max-new-tokens", "3900"]
    env = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=env, start_new_session=True)
    os.close(inner)
    seen = ""

    def until(pattern):
        nonlocal seen
        deadline, text = time.monotonic() + limit(300), ""
        while not re.search(pattern, text):
            assert time.monotonic() < deadline, f"{pattern} is not in {text!r} after {seen!r}"
            if select.select([terminal], [], [], 1)[0]:
                text += os.read(terminal, 4096).decode(errors="replace")
        seen += text
        return text

    def say(line):
        os.write(terminal, line.encode() + b"\n")

    def interrupt():
        time.sleep(0.2)  # as a person: Python's input() misses a signal that comes between its prompt and its read
        os.killpg(process.pid, signal.SIGINT)

    try:
        until(r"Ctrl-D leaves\r\n> ")
        interrupt()
        until(r"Ctrl-D leaves\r\n> ")
        say("31=")
        until(r"31=\r\n {20}")  # some of the answer, long before its end
        interrupt()
        until(r"\[cut after \d+ tokens\]\r\n> ")
        say("x" * 200)  # in one conversation with what was said before
        until(r"exceed the model's limit of 4,096[^>]*new conversation\r\n> ".replace(" ", r"\s+"))
        os.write(terminal, b"31\xff=\n")
        until(r"expected UTF-8 text without lone.*\r\n(.*\r\n)?> ")
        say("/unknown")
        until(r"/unknown: unknown; .*\r\n(.*\r\n)?> ")
        for command in ("/system Sum.", "/reset"):
            say(command)
            until(r"a new conversation, with a system message\r\n> ")
        os.write(terminal, b"\x04")
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
