"""The built-in model: the same for the same text and seed, loadable by plain transformers, good at copying."""

import hashlib
import os
import subprocess
import sys

import pytest
import torch
from models import Sums
from places import SUPPORT
from transformers import AutoModelForCausalLM, AutoTokenizer

from accel_sft import UserError
from accel_sft.api.config import TrainConfig
from accel_sft.models.source import resolved
from accel_sft.models.tiny import build_tiny, common_openings
from accel_sft_math import Math

SYSTEM = "You are a helpful assistant. 请回答问题。"
PREFIX = "王大丫丫的回答是--->"
TEXTS = [text for n in range(2, 80) for text in (SYSTEM, f"{n}=", f"{PREFIX}{n % 7} + {n - n % 7}")]
ENTITIES = [
    text
    for n, name in enumerate(["Anna", "Boris", "叶老桂", "Zoë", "李明"] * 12)
    for text in (SYSTEM, f"{name} works in Paris.", f'{{"name": {{"{name}": [[{n}, {n + 3}]]}}}}')
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "new" / "model"
    build_tiny(path, [*TEXTS, *ENTITIES], seed=1)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder):
    return AutoTokenizer.from_pretrained(folder)


def pieces(tokenizer, text):
    return [tokenizer.decode([index]) for index in tokenizer(text, add_special_tokens=False)["input_ids"]]


def test_plain_transformers_load_a_qwen2_of_about_a_million_parameters(folder, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen2"
    assert model.config.hidden_size
    assert model.dtype == torch.float32
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert 0.5e6 < sum(parameter.numel() for parameter in model.parameters()) < 2e6
    assert len(tokenizer) <= model.config.vocab_size
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_chat_markers_are_one_token_each(tokenizer):
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for marker in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert pieces(tokenizer, marker) == [marker]
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "12="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n12=<|im_end|>\n<|im_start|>assistant\n")
    answered = tokenizer.apply_chat_template([*messages, {"role": "assistant", "content": "7"}], tokenize=False)
    assert answered == f"{text}7<|im_end|>\n"


def test_constant_text_is_short_and_what_varies_is_spelt_out(tokenizer):
    assert pieces(tokenizer, SYSTEM) == [SYSTEM]
    assert pieces(tokenizer, f"{PREFIX}10 + 234")[:3] == [PREFIX, "1", "0"]
    assert pieces(tokenizer, "2048") == list("2048")
    assert pieces(tokenizer, "叶李明") == list("叶李明")
    assert pieces(tokenizer, "system") == ["system"]


def test_names_are_spelt_alike_in_sentence_and_json(tokenizer):
    for name in ("Anna", "Nobody", "叶老桂", "Zoë"):
        alone = tokenizer(name)["input_ids"]
        for context in ("in {} .", '{{"name": {{"{}": [[0, 3]]}}}}', "在{}工作", '"{}"'):
            ids = tokenizer(context.format(name))["input_ids"]
            assert any(ids[at : at + len(alone)] == alone for at in range(len(ids))), (name, context)


def test_any_text_round_trips(tokenizer, tmp_path):
    odd = [" two  spaces\t and\r\n\nlines ", "日本語カナ 한국어 ไทย עברית العربية", "😀 👨‍👩‍👧 \U0001f1e8\U0001f1f3"]
    odd += ["\x00\x7f\u200b\u3000\ufeff Ġ▁ <0x0A>", "٣٤٥ ²³"]
    opened = [f"Réponse:{n}" for n in range(40)]  # a token of Latin-1 letters, which a decoder may take for bytes
    build_tiny(tmp_path, opened, seed=0)
    for own, texts in ((tokenizer, odd), (AutoTokenizer.from_pretrained(tmp_path), opened)):
        assert [own.decode(own(text)["input_ids"]) for text in texts] == texts


def test_openings_are_shared_by_many_and_leave_digits_alone():
    assert common_openings([f"Answer is 1{n}" for n in range(10)]) == ["Answer is "]
    assert common_openings(["short"] * 20) == []
    assert common_openings(["the only three texts", "of a task with", "hardly any rows"]) == []
    assert common_openings([f"text of {n} its own" * n for n in range(1, 100)][::9]) == ["text of "]
    assert common_openings([*(f"{n} other text" for n in range(40)), "Once only, this"]) == []


def digest(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def test_the_same_in_every_process_and_another_with_another_seed(folder, tmp_path):
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = sys.argv[1].split(':'); import test_tiny as t;"
        "t.build_tiny(Path(sys.argv[2]), [*t.TEXTS, *t.ENTITIES], 1)"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"}
    paths = os.pathsep.join((str(SUPPORT), os.path.dirname(__file__)))
    subprocess.run([sys.executable, "-c", code, paths, str(tmp_path / "again")], check=True, env=env)
    assert digest(tmp_path / "again") == digest(folder)
    before = torch.random.get_rng_state()
    build_tiny(tmp_path / "other", [*TEXTS, *ENTITIES], seed=2)
    assert torch.equal(before, torch.random.get_rng_state()), "the caller's random state is left alone"
    other = digest(tmp_path / "other")
    assert {name for name, value in digest(folder).items() if other[name] != value} == {"model.safetensors"}


def test_no_text_is_refused(tmp_path):
    with pytest.raises(UserError, match="no"):
        build_tiny(tmp_path, ["", ""], seed=0)


def test_steps_of_tiny_are_the_tasks_unless_given():
    assert resolved(TrainConfig(), Math).max_steps == Math.tiny_steps == 700
    assert resolved(TrainConfig(), Sums).max_steps == 1400
    assert resolved(TrainConfig(max_steps=9), Math).max_steps == 9
