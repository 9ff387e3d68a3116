"""Models that come without a chat template: given one with its tokens, trained whole or by an adapter; raw text."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from accelerate import Accelerator
from chats import jsonl
from click.testing import CliRunner
from conftest import accel_sft, finished
from models import Sums, encode, make_base, make_tiny
from peft import AutoPeftModelForCausalLM
from reference_job import FP32, goes_on_to_the_same_bits, same_curve
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.checkpoint import checkpoint
from accel_sft.commands.generate import generate
from accel_sft.commands.serve import serve
from accel_sft.models.load import load_model
from accel_sft.models.merge import merge
from accel_sft.models.source import Source, find_source
from accel_sft.models.tokenizer import GivenTemplate, encoding_rules, load_tokenizer
from accel_sft.tools.parity.command import parity

ASKED = [{"role": "user", "content": "12="}]
STEPS = ("--max-steps", "6", "--global-batch-size", "8", "--max-length", "32", "--learning-rate", "0.01", "--seed", "3")
STEPS += ("--save-every", "3")
LONG, TIED = pytest.mark.long, ({"tied": True}, {"spare": 64})
OTHER = "{% for m in messages %}<turn>{{ m.role }} {{ m.content }}</turn>{% endfor %}"
"""A template of marks that nothing but their place shows to be control tokens."""


def given(folder, template, **options):
    template = GivenTemplate(str(template), False)
    source = find_source(str(folder))
    return load_tokenizer(source, trust_remote_code=False, given=template, **options), template, source


def test_chatml_makes_its_marks_tokens_at_which_answers_end(tmp_path):
    tokenizer, template, source = given(make_base(tmp_path / "base"), "chatml")
    size = len(tokenizer) - 2
    assert template.new_tokens == [size, size + 1]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tokenizer.apply_chat_template(ASKED, tokenize=True, return_dict=True)["input_ids"]
    assert (ids[0], ids.count(size + 1)) == (size, 1)
    assert "<|im_start|>, <|im_end|> become special tokens" in template.lines[0]
    assert tokenizer.eos_token_id in encoding_rules(tokenizer, source, TrainConfig().resolved({})).eos_ids
    tokenizer.save_pretrained(tmp_path / "base")  # as weights that were trained with it are saved
    again, template, _ = given(tmp_path / "base", "chatml")
    assert (template.new_tokens, len(again)) == ([], size + 2)
    assert "has all control tokens of the template" in template.lines[0]


def test_chatml_begins_with_bos_where_the_base_does(tmp_path):
    base = make_base(tmp_path / "base", bos=True)
    tokenizer, template, _ = given(base, "chatml")
    ids = tokenizer.apply_chat_template(ASKED, tokenize=True, return_dict=True)["input_ids"]
    assert (ids[0], ids.count(tokenizer.bos_token_id)) == (tokenizer.bos_token_id, 1)
    assert not any("warning" in line for line in template.lines)
    for text, warns in ((OTHER, True), ("{{ bos_token }}" + OTHER, False)):
        (tmp_path / "other.jinja").write_text(text)
        _, template, _ = given(base, tmp_path / "other.jinja")
        assert any("texts begin with <s>, but the template's do not" in line for line in template.lines) == warns


def test_marks_of_a_given_template_become_tokens(tmp_path):
    base = make_base(tmp_path / "base")
    (tmp_path / "other.jinja").write_text(OTHER)
    tokenizer, _, _ = given(base, tmp_path / "other.jinja")
    assert tokenizer.eos_token == "</turn>"
    assert len(tokenizer("<turn>")["input_ids"]) > 1 == len(tokenizer("</turn>")["input_ids"])
    tokenizer, template, _ = given(base, make_tiny(tmp_path / "tiny"))  # START is written by the template alone
    assert tokenizer.convert_ids_to_tokens(template.new_tokens) == ["<|im_start|>", "<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("\n{% for", "line 2: [^;]*; fix it, or name another$"),
        ("{{ raise_exception('No.') }}", "it fails on a conversation: No\\.; fix it, or name another$"),
        (" \n", "it is empty; name another$"),
        ("{{ messages[0].content }}", "it does not write the assistant's answers"),
        (None, "neither chatml nor a file, nor a model: .*cannot be loaded"),
        ("base", "this model's tokenizer has no chat template"),
    ],
)
def test_a_template_that_is_none_is_refused(tmp_path, template, said):
    base, file = make_base(tmp_path / "base"), tmp_path / "template.jinja"
    if template not in (None, "base"):
        file.write_text(template)
    with pytest.raises(UserError, match=rf"^--chat-template .*{said}"):
        given(base, base if template == "base" else file)


def loaded(source, tokenizer, template, **options):
    """A base model as a training loads it that adds chatml's tokens."""
    config = TrainConfig(chat_template="chatml", **options).resolved({})
    tokens = {"tokenizer": tokenizer, "new_tokens": template.new_tokens}
    return load_model(source, config, precision="no", deepspeed=False, total_steps=3, **tokens)


@pytest.mark.parametrize("ends", [{"tied": False}, *(pytest.param(ends, marks=LONG) for ends in TIED)])
def test_adapter_carries_new_rows_into_peft_and_merged_weights(tmp_path, ends):
    tokenizer, template, source = given(make_base(tmp_path / "base", **ends), "chatml")
    model = loaded(source, tokenizer, template, adapter="lora").eval()
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "trainable_tokens" in name or "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    rows = {name: p for name, p in model.named_parameters() if "trainable_tokens" in name}
    assert [tuple(p.shape) for p in rows.values()] == [(2, 32)] * (1 if ends.get("tied", True) else 2)
    assert model.get_base_model().config.vocab_size == len(tokenizer) + max(ends.get("spare", 2) - 2, 0)
    ids = tokenizer.apply_chat_template(ASKED, return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        ours = model(input_ids=ids).logits
    checkpoint.export(Accelerator(cpu=True), model, tokenizer, tmp_path / "adapter", "")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert not any("base_layer" in name or name.endswith("embed_tokens.weight") for name in saved)
    plain = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    source = find_source(str(tmp_path / "adapter"))
    reloaded = load_tokenizer(source, trust_remote_code=False)
    assert reloaded.apply_chat_template(ASKED, return_tensors="pt", return_dict=True)["input_ids"].equal(ids)
    summed, _ = merge(source, reloaded, "float32", trust_remote_code=False)
    with torch.no_grad():
        for other in (plain, summed):
            torch.testing.assert_close(other(input_ids=ids).logits[..., : len(tokenizer)], ours[..., : len(tokenizer)])
    assert summed.generation_config.eos_token_id == [tokenizer.eos_token_id, 0]


def test_train_only_must_name_the_embedding_of_new_tokens(tmp_path):
    tokenizer, template, source = given(make_base(tmp_path / "base", tied=False), "chatml")
    model = loaded(source, tokenizer, template, adapter="lora", lora_modules_to_save="embed_tokens,lm_head")
    assert not any("trainable_tokens" in name for name, _ in model.named_parameters())  # they are trained whole
    with pytest.raises(UserError, match="--train-only mlp leaves out the embeddings of 2 tokens"):
        loaded(source, tokenizer, template, train_only="mlp")
    model = loaded(source, tokenizer, template, train_only="mlp|embed_tokens")
    assert model.model.embed_tokens.weight.requires_grad


@pytest.mark.parametrize(("tied", "spare"), [(True, 64), (False, 64), (False, 0)])
def test_new_rows_are_a_function_of_the_seed_in_spare_rows_too(tmp_path, tied, spare):
    folder = make_base(tmp_path / "base", tied=tied, spare=spare)
    weights = load_file(folder / "model.safetensors")
    tokenizer, template, source = given(folder, "chatml")
    for name in [name for name in weights if name.endswith(("embed_tokens.weight", "lm_head.weight"))]:
        weights[name][min(template.new_tokens) :] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = loaded(source, tokenizer, template, seed=3)
    ends = [part.weight.detach() for part in (model.get_input_embeddings(), model.get_output_embeddings())]
    spread = ends[0][: min(template.new_tokens)].std(0).mean()
    for rows in (end[template.new_tokens] for end in ends):
        assert not torch.equal(rows[0], rows[1])
        assert 0 < (rows[0] - rows[1]).abs().mean() < spread
    assert (ends[0][max(template.new_tokens) + 1 :] == 0).all()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    tokenizer.save_pretrained(tmp_path / "trained")
    torch.manual_seed(1)
    as_it_began = Source(source.weights, str(tmp_path / "trained"), adds_tokens=True, rows_seed=3)
    how = {"precision": "no", "deepspeed": False, "total_steps": 0, "tokenizer": tokenizer}
    began = load_model(as_it_began, TrainConfig().resolved({}), **how)
    assert torch.equal(began.get_input_embeddings().weight, ends[0]), "it is a function of the seed"
    assert not torch.equal(loaded(source, tokenizer, template, seed=2).get_input_embeddings().weight, ends[0])


class Documents(Sums):
    """Raw text."""

    def dataset(self, split):
        return ["a", "12=", *("the answer is " * count for count in range(1, 30))]

    def messages(self, example):
        return []

    def target(self, example):
        return example


@pytest.mark.parametrize(("bos", "longest"), [(True, 2), (False, 7), (False, 64)])
def test_each_token_of_raw_text_is_learnt_once(tmp_path, bos, longest):
    tokenizer = load_tokenizer(
        find_source(str(make_base(tmp_path / "base", bos=bos))), trust_remote_code=False, templated=False
    )
    task = Documents()
    documents = task.dataset("train")
    result = encode(tokenizer, task, documents, "train", eos_ids=[0], max_length=longest, truncation="error")
    assert not result.left_out
    seen = dict.fromkeys(range(len(documents)), 0)
    for index, rows in itertools.groupby(result.kept, key=lambda row: row.index):
        whole = [*tokenizer(documents[index])["input_ids"], tokenizer.eos_token_id]
        learnt = []
        for number, row in enumerate(rows):
            assert len(row.input_ids) <= longest
            assert row.input_ids[0] == (whole[0] if number == 0 else learnt[-1])
            learnt += [row.input_ids[at] for span in row.learnt for at in span]
        seen[index] = number + 1
        assert learnt == whole[1:]  # bos, or else the text's first token, has nothing before it
    assert [index for index, count in seen.items() if count > 1] == result.windowed
    assert any("as nothing precedes it" in note for note in result.notes) != bos


def test_raw_text_is_characters_and_chat_needs_a_template(tmp_path):
    source = find_source(str(make_base(tmp_path / "base")))
    tokenizer = load_tokenizer(source, trust_remote_code=False, templated=False)
    rules = {"eos_ids": [0], "max_length": 99, "truncation": "drop"}
    (row,) = encode(tokenizer, Documents(), ["<|endoftext|>"], "train", **rules).kept
    assert row.input_ids.count(0) == 1 < len(row.input_ids)
    with pytest.raises(UserError, match=r"no chat template; add --chat-template chatml"):
        encode(tokenizer, Sums(), [24], "train", **rules)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base models")
    for tied in (True, False):
        base = make_base(folder / f"tied {tied}", tied=tied)
        (base / "tokenizer.model").touch()
    chats = [{"prompt": f"{n}=", "completion": f"{n} + {n}"} for n in range(40)]
    texts = [{"text": f"the answer is {n} + {n} " * (1 + n % 4)} for n in range(40)]
    for name, rows in {"chats": chats, "texts": texts}.items():
        jsonl(folder / f"{name}.jsonl", rows)
    return folder


def test_the_perplexity_of_raw_text_is_that_of_plain_transformers(folder, tmp_path):
    rows = [json.loads(line) for line in (folder / "texts.jsonl").read_text().splitlines()[:9]]
    run = finished(
        *("chat", "--model", str(folder / "tied True"), "--train-file", str(folder / "texts.jsonl"), *STEPS),
        *("--validation-file", jsonl(tmp_path / "held_out.jsonl", rows)),
        run_dir=tmp_path / "run",
    )
    assert " texts above --max-length become windows" in run.output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "final").eval()
    nll, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id])
        for at in range(0, len(ids) - 1, 31):
            window = ids[at : at + 32]
            with torch.no_grad():
                nll += torch.nn.functional.cross_entropy(
                    model(window[None]).logits[0, :-1], window[1:], reduction="sum"
                )
            count += len(window) - 1
    assert run.result()["after"]["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert run.result()["main_metric"] == "perplexity"
    question, folder = "the answer is 12", str(tmp_path / "run")
    ids = torch.tensor([tokenizer(question)["input_ids"]])
    expected = tokenizer.decode(model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :], True)
    rows = jsonl(tmp_path / "rows.jsonl", [{"prompt": question}])
    files = "--file", rows, "--output", str(tmp_path / "answers.jsonl")
    answered = CliRunner().invoke(generate, (folder, *files, "--max-new-tokens", "9"), catch_exceptions=False)
    assert answered.exit_code == 0, answered.output
    assert json.loads((tmp_path / "answers.jsonl").read_text())["generated"] == expected
    with pytest.raises(UserError, match="raw text has no answers"):
        CliRunner().invoke(parity, (folder, "--url", "http://127.0.0.1:9/v1"), catch_exceptions=False)
    assert "/v1/completions" in CliRunner().invoke(serve, (folder, "--print")).stderr
    with pytest.raises(UserError, match="trained on raw text"):
        CliRunner().invoke(generate, (folder, question, "--system", "Be kind."), catch_exceptions=False)


SETTINGS = [
    (False, "lora", "z2"),
    pytest.param(True, "lora", "z3", marks=LONG),
    pytest.param(False, "lora", "z3", marks=LONG),
    pytest.param(True, "none", "z2", marks=LONG),
    pytest.param(False, "none", "z3", marks=LONG),
]


def trained(launched, folder, tied, adapter, name):
    model = ("--model", str(folder / f"tied {tied}"), "--adapter", adapter, "--chat-template", "chatml")
    options = {} if name == "plain" else {"yaml": name, "launcher": FP32, "real": name == "z3"}
    arguments = ("chat", *model, "--train-file", str(folder / "chats.jsonl"), *STEPS, "--eval-every", "off")
    return launched(f"base {tied} {adapter} {name}", *arguments, **options)


@pytest.mark.parametrize(("tied", "adapter", "name"), SETTINGS)
def test_a_base_models_curve_is_the_same_on_every_layout(launched, folder, tied, adapter, name):
    plain, other = trained(launched, folder, tied, adapter, "plain"), trained(launched, folder, tied, adapter, name)
    same_curve(plain.lines(), other.lines())
    assert not (plain.run_dir / "final" / "tokenizer.model").exists(), "it would lack the template's tokens"


@LONG
@pytest.mark.parametrize("name", ["plain", "z3"])
def test_run_with_new_tokens_resumes_to_the_same_bits(launched, folder, tmp_path, name):
    goes_on_to_the_same_bits(trained(launched, folder, False, "lora", name), tmp_path / "again", 3)


@LONG
def test_a_template_file_that_changed_is_refused_at_a_resume(folder, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(OTHER)
    arguments = ("chat", "--model", str(folder / "tied True"), "--train-file", str(folder / "chats.jsonl"), *STEPS)
    arguments += ("--eval-every", "off", "--chat-template", str(template))
    finished(*arguments, run_dir=tmp_path / "run")
    (tmp_path / "run" / "result.json").write_text('{"status": "running"}')
    template.write_text(OTHER.replace("<turn>", "<turn> "))
    again = accel_sft(*arguments, "--resume", "auto", run_dir=tmp_path / "run")
    assert (again.status, "the run was started with another template" in again.output) == (1, True)
