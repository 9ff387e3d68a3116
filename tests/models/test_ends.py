"""Where answers end: what is learnt there, what exports say of it, and where plain transformers stops."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from chats import jsonl
from conftest import finished
from models import Sums, encode, make_base
from report_card import card
from transformers import AutoTokenizer, GenerationConfig

from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import checkpoint
from accel_sft.evaluation.generate import generate
from accel_sft.models.load import load_model
from accel_sft.models.source import find_source
from accel_sft.models.tiny import CHAT_TEMPLATE
from accel_sft.models.tokenizer import encoding_rules, left_out, load_tokenizer


def ending(mark):
    return CHAT_TEMPLATE.replace("<|im_end|>", mark)


ENDS = {
    "Qwen's base": (CHAT_TEMPLATE, "<|im_end|>"),
    "two marks": (ending("<|im_end|><|im_start|>"), "<|im_end|>"),
    "another mark before it": (ending("{{ '<|a|>' if message.role == 'assistant' }}<|im_end|>"), "<|a|><|im_end|>"),
    "two of answers alone": (ending("{{ '<|a|><|im_end|>' if message.role == 'assistant' }}"), "<|a|><|im_end|>"),
    "the tokenizer's own": (ending("{{ eos_token }}"), "<|endoftext|>"),
    "no token": (ending("</s>"), "</s>\n<|endoftext|>"),
    "a line break": (ending("{{ '\\n' }}"), "\n\n<|endoftext|>"),
}
"""Chat templates of a tokenizer whose eos ends texts, and how an answer ends with each."""
SAMPLED = {"temperature": 0.7, "top_p": 0.8, "eos_token_id": 0}


def base(folder: Path, template: str = CHAT_TEMPLATE, **generation) -> Path:
    """A base model that ships a chat template, the tokens of which are in its vocabulary."""
    make_base(folder, spare=8)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<|a|>"], special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def warning_of(folder):
    """What loading the model says of its generation settings."""
    model, tokenizer, _ = loaded(folder, lines := [])
    (line,) = [line for line in lines if "generation_config" in line]
    return line, model, tokenizer


def loaded(folder: Path, lines=None, **options):
    config = TrainConfig(**options).resolved({})
    source = find_source(str(folder))
    tokenizer = load_tokenizer(source, trust_remote_code=False)
    how = {"precision": "no", "deepspeed": False, "total_steps": 3, "tokenizer": tokenizer}
    model = load_model(source, config, log=(lines if lines is not None else []).append, **how)
    return model, tokenizer, encoding_rules(tokenizer, source, config)


@pytest.mark.parametrize("name", ENDS)
def test_token_that_ends_a_turn_ends_the_answer(tmp_path, name):
    template, end = ENDS[name]
    model, tokenizer, rules = loaded(base(tmp_path / "base", template))
    made = encode(tokenizer, Sums(), [24], "train", eos_ids=rules.eos_ids, max_length=99, truncation="drop")
    (row,) = made.kept
    assert tokenizer.decode(row.input_ids[row.prompt_length :]) == f"the answer is 12 + 12{end}"
    assert row.input_ids[-1] in rules.eos_ids
    named = model.generation_config.eos_token_id
    assert row.input_ids[-1] in (named if isinstance(named, list) else [named])
    assert any("is not a special token" in note for note in made.notes) == (name == "no token")


class Calls(Sums):
    def target(self, example):
        call = {"type": "function", "function": {"name": "add", "arguments": {"to": example}}}
        return [{"role": "assistant", "content": "", "tool_calls": [call] * 2}]


def ending_calls(end, beside=""):
    """The chat template with this text behind a turn's calls, and this behind a call."""
    turn_end = "{% if message['tool_calls'] %}" + end + "{% else %}<|im_end|>{% endif %}\n{% endfor %}"
    return CHAT_TEMPLATE.replace("<|im_end|>\n{% endfor %}", turn_end).replace("</tool_call>", f"</tool_call>{beside}")


@pytest.mark.parametrize(("end", "last"), [("<|a|>\n", "<|a|>"), ("<|im_end|>", "<|im_end|>")])
def test_token_that_ends_calls_alone_ends_them(tmp_path, end, last):
    model, tokenizer, rules = loaded(base(tmp_path / "base", ending_calls(end), eos_token_id=0))
    assert rules.eos_ids == {0, *tokenizer.convert_tokens_to_ids(["<|im_end|>", last])}
    called = '<tool_call>{"name": "add", "arguments": {"to": 24}}</tool_call>'
    for task, expected in ((Calls(), called * 2 + last), (Sums(), "the answer is 12 + 12<|im_end|>")):
        (row,) = encode(tokenizer, task, [24], "train", eos_ids=rules.eos_ids, max_length=999, truncation="drop").kept
        assert tokenizer.decode(row.input_ids[row.prompt_length :]) == expected
        assert row.input_ids[-1] in model.generation_config.eos_token_id


def test_mark_behind_each_call_ends_no_answer(tmp_path):
    _, tokenizer, rules = loaded(base(tmp_path / "base", ending_calls("", "<|a|>")))
    assert tokenizer.convert_tokens_to_ids("<|a|>") not in rules.eos_ids


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_export_stops_where_answers_end(tmp_path, adapter):
    model, tokenizer, rules = loaded(base(tmp_path / "base"), adapter=adapter)
    checkpoint.export(Accelerator(cpu=True), model, tokenizer, tmp_path / "out", "")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert {*settings.eos_token_id} == rules.eos_ids == {0, tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_adapter_of_a_chatml_base_serves_to_the_end(tmp_path, monkeypatch):
    rows = jsonl(tmp_path / "rows.jsonl", ({"prompt": f"{n}=", "completion": "the answer"} for n in range(10, 30)))
    words = ("--train-file", rows, "--held-out", "0", "--max-steps", "20", "--max-new-tokens", "9", "--adapter", "lora")
    words += ("--learning-rate", "0.02", "--global-batch-size", "10", "--lora-r", "16")
    words += ("--eval-every", "off", "--save-every", "off", "--tracker", "none")
    run = finished("chat", "--model", str(base(tmp_path / "base")), *words, run_dir=tmp_path / "run")
    assert "answers end with <|im_end|>, but a server running the base model does not" in " ".join(run.output.split())
    final = tmp_path / "run" / "final"
    assert AutoTokenizer.from_pretrained(final).eos_token == "<|im_end|>"  # where vLLM stops
    monkeypatch.chdir(final)
    code = re.search("```python\n(.*?)```", Path("README.md").read_text(), re.S)[1]
    exec(code.replace("max_new_tokens=9", "max_new_tokens=30"), said := {})
    assert said["answer"] == "the answer"


def test_settings_that_cannot_be_saved_are_removed_and_named(tmp_path):
    line, model, tokenizer = warning_of(base(tmp_path / "base", **SAMPLED))
    assert "temperature 0.7, top_p 0.8 has no effect" in line
    checkpoint.export(Accelerator(cpu=True), model, tokenizer, tmp_path / "out", "")
    settings = GenerationConfig.from_pretrained(tmp_path / "out")
    assert (settings.temperature, settings.eos_token_id[0]) == (None, 0)


def test_penalties_of_the_base_are_named_and_left_out(tmp_path):
    folder = base(tmp_path / "base")
    question, device = [[5, 6, 7]], torch.device("cpu")

    def answer(model):
        return generate(model, question, 12, [0], 0, device)[0]

    plain = answer(loaded(folder)[0])
    given = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "suppress_tokens": plain[0], "min_new_tokens": 12}
    line, model, _ = warning_of(base(folder, **given, bad_words_ids=[[plain[0][0]]], eos_token_id=0))
    assert line.startswith("generation_config.json sets repetition_penalty, no_repeat_ngram_size, min_new_tokens, bad_")
    assert answer(model) == plain
    arguments = left_out(model.generation_config)
    assert "do_sample=False, repetition_penalty=1.0, no_repeat_ngram_size=0" in card(left_out=arguments)
    assert "suppress_tokens=None, eos_token_id=[2, 0])" in card(left_out=arguments, adapter="lora")
    assert "penalty" not in card(left_out={})


class Raw(Sums):
    def messages(self, example):
        return []


def test_raw_text_ends_with_the_tokenizers_own_eos(tmp_path):
    _, tokenizer, rules = loaded(base(tmp_path / "base"))
    made = encode(tokenizer, Raw(), [24], "train", eos_ids=rules.eos_ids, max_length=99, truncation="drop")
    assert tokenizer.decode(made.kept[0].input_ids) == "the answer is 12 + 12<|endoftext|>"
