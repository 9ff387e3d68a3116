"""Any causal language model trains as its rows one by one would, and answers as greedy search does."""

from __future__ import annotations

import json

import architectures
import pytest
import torch
from conftest import accel_sft, finished
from models import encode
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft_math import Math

DATA = {"train_examples": 24, "validation_examples": 5}
JOB = ["--max-steps", "2", "--eval-every", "2", "--save-every", "off", "--max-new-tokens", "8", "--dtype", "float32"]
JOB += ["--global-batch-size", "24", "--train-examples", "24", "--validation-examples", "5"]
KINDS = ("qwen2", "qwen3_moe", "lfm2", "qwen2_5_vl")
"""One family of each kind: dense, with experts, with a state, for images."""


def families(names):
    return [architectures.parameter(name, *([] if name in KINDS else [pytest.mark.long])) for name in names]


@pytest.fixture(scope="module", params=families(architectures.FAMILIES))
def run(request, tmp_path_factory):
    """The folder of a family's model, and a short run of it."""
    folder = tmp_path_factory.mktemp(request.param)
    model = architectures.make(folder / "model", request.param)
    return model, accel_sft("math", *JOB, "--model", str(model), run_dir=folder / "run")


def rows(model, split):
    """The model, its tokenizer, and the examples of a split as token ids."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": 512, "truncation": "error"}
    task = Math(**DATA)
    encoded = encode(tokenizer, task, task.dataset(split), split, **rules).kept
    return architectures.load(model), tokenizer, encoded


@torch.no_grad()
def losses(network, example):
    """The loss of each token of an example's answer, the example alone."""
    ids = torch.tensor([example.input_ids])
    logits = network(input_ids=ids, use_cache=False).logits[0, :-1]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[example.prompt_length - 1 :].tolist()


def test_the_first_step_has_the_loss_of_single_rows(run):
    model, launched = run
    assert launched.status == 0, launched.output[-3000:]
    network, tokenizer, examples = rows(model, "train")
    total = supervised = 0.0
    for example in examples:
        assert example.input_ids[-1] == tokenizer.eos_token_id
        nll = losses(network, example)
        total, supervised = total + sum(nll), supervised + len(nll)
    first = launched.lines()[0]
    assert first["supervised_tokens"] == supervised
    random = model.parent.name.startswith(tuple(architectures.RANDOM))
    assert first["loss"] == pytest.approx(total / supervised, rel=2e-2 if random else 1e-4)
    assert not (random and launched.result()["batching"]["layout"] == "shared"), "rows would share what is drawn"


MORE = ("deepseek_v3", "gpt_oss", "llama4", "falcon_h1", "nemotron_h", "falcon_mamba", "gemma3", "qwen3_5", "gpt2")


@pytest.mark.parametrize("family", families([*KINDS, *MORE]))
def test_an_adapter_trains_and_plain_peft_loads_it_again(family, tmp_path):
    model = architectures.make(tmp_path / "model", family)
    quick = "--adapter", "lora", "--lora-r", "2", "--learning-rate", "0.01", "--eval-limit", "1"
    launched = finished("math", *JOB, *quick, "--model", str(model), run_dir=tmp_path / "run")
    first, second = (line["loss"] for line in launched.lines())
    network, _, examples = rows(model, "validation")
    if type(network.config) in AutoModelForCausalLM._model_mapping:  # of multimodal weights it is the language model
        network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    evaluated = examples[json.loads((launched.run_dir / "samples" / "step-000000.jsonl").read_text())["index"]]
    untrained = sum(losses(network, evaluated))
    trained = losses(PeftModel.from_pretrained(network, launched.run_dir / "final").eval(), evaluated)
    assert second < first
    assert sum(trained) < untrained
    assert launched.result()["after"]["eval_loss"] == pytest.approx(sum(trained) / len(trained), rel=1e-4)


@torch.no_grad()
def test_answers_are_those_of_greedy_search_by_prompt(run):
    model, launched = run
    assert launched.status == 0, launched.output[-3000:]
    network, tokenizer, examples = rows(model, "validation")
    samples = (launched.run_dir / "samples" / "step-000000.jsonl").read_text().splitlines()
    for example, sample in zip(examples, map(json.loads, samples), strict=True):
        prompt = torch.tensor([example.input_ids[: example.prompt_length]])
        made = network.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=8, num_beams=1
        )
        assert sample["generated"] == tokenizer.decode(made[0, prompt.shape[1] :], skip_special_tokens=True)
