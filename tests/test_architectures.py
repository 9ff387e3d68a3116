"""Any causal language model trains as its rows one by one would, and answers as greedy search does."""

from __future__ import annotations

import json

import architectures
import pytest
import torch
from conftest import accel_sft
from models import encode
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft_math import Math

DATA = {"train_examples": 24, "validation_examples": 5}
JOB = (
    "--max-steps",
    "2",
    "--global-batch-size",
    str(DATA["train_examples"]),
    "--max-new-tokens",
    "8",
    "--dtype",
    "float32",
)
JOB += tuple(word for name, value in DATA.items() for word in (f"--{name.replace('_', '-')}", str(value)))


@pytest.fixture(scope="module", params=architectures.FAMILIES)
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
    kept = encode(tokenizer, task, task.dataset(split), split, **rules).kept
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), tokenizer, kept


@torch.no_grad()
def test_the_first_step_has_the_loss_of_single_rows(run):
    model, launched = run
    assert launched.status == 0, launched.output[-3000:]
    network, tokenizer, examples = rows(model, "train")
    total = supervised = 0.0
    for example in examples:
        assert example.input_ids[-1] == tokenizer.eos_token_id
        ids = torch.tensor([example.input_ids])
        logits = network(input_ids=ids, use_cache=False).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")[example.prompt_length - 1 :]
        total, supervised = total + nll.sum().item(), supervised + len(nll)
    first = launched.lines()[0]
    assert first["supervised_tokens"] == supervised
    random = model.parent.name.startswith(tuple(architectures.RANDOM))
    assert first["loss"] == pytest.approx(total / supervised, rel=2e-2 if random else 1e-4)
    assert not (random and launched.result()["batching"]["layout"] == "shared"), "rows would share what is drawn"


@torch.no_grad()
def test_answers_are_those_of_greedy_search_one_prompt_at_a_time(run):
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
