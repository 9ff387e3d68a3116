"""Law 2: what carries loss, and what was left out, is known by name."""

from __future__ import annotations

import pytest
from models import Sums, encode, make_tiny
from transformers import AutoTokenizer

from accel_sft import UserError
from accel_sft.chat.encoded import end_of_turn_ids
from accel_sft.models.source import Source
from accel_sft.models.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return AutoTokenizer.from_pretrained(make_tiny(tmp_path_factory.mktemp("tiny") / "model"))


def encoded(tokenizer, task=None, examples=(24, 31), **rules):
    rules = {"eos_ids": end_of_turn_ids(tokenizer), "max_length": 512, "truncation": "drop", **rules}
    return encode(tokenizer, task or Sums(), examples, "train", **rules)


def test_the_answer_and_its_end_of_turn_carry_loss_and_nothing_else(tokenizer):
    (first, _) = encoded(tokenizer).kept
    answer = first.input_ids[first.prompt_length :]
    assert tokenizer.decode(answer) == "the answer is 12 + 12<|im_end|>"
    assert answer[-1] == tokenizer.eos_token_id
    assert first.supervised_tokens == len(answer)
    assert tokenizer.decode(first.input_ids[: first.prompt_length]).endswith("24=<|im_end|>\n<|im_start|>assistant\n")


def test_a_pad_token_that_is_the_end_of_turn_changes_nothing(tokenizer):
    import copy

    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    assert [e.input_ids for e in encoded(same).kept] == [e.input_ids for e in encoded(tokenizer).kept]


def test_a_template_without_an_end_of_turn_gets_one(tokenizer):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    (example,) = encoded(bare, examples=[24]).kept
    assert example.input_ids[-1] == bare.eos_token_id


def test_a_prompt_that_is_no_prefix_is_an_error_that_shows_where(tokenizer):
    import copy

    odd = copy.deepcopy(tokenizer)
    odd.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}{{ '?' if add_generation_prompt else '!' }}"
        "{{ m['content'] }}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"train example 0: the prompt is not a prefix .* at token \d+"):
        encoded(odd)


def test_long_examples_are_counted_and_named(tokenizer):
    lengths = [len(e.input_ids) for e in encoded(tokenizer, examples=[5, 24, 7]).kept]
    longest = max(lengths)
    result = encoded(tokenizer, examples=[5, 24, 7], max_length=longest - 1)
    left_out = [index for index, length in enumerate(lengths) if length == longest]
    assert [e.index for e in result.kept] == [i for i in range(3) if i not in left_out]
    assert result.lines() == [
        f"train: {len(left_out)} left out: longer than --max-length {longest - 1} "
        f"(examples {', '.join(map(str, left_out))})"
    ]


def test_cutting_is_counted_and_loses_the_end_of_turn(tokenizer):
    (whole,) = encoded(tokenizer, examples=[24]).kept
    result = encoded(tokenizer, examples=[24], max_length=len(whole.input_ids) - 2, truncation="right")
    assert result.cut == [0]
    assert result.kept[0].input_ids == whole.input_ids[:-2]
    assert "cut to --max-length" in result.lines()[0]


def test_a_cut_that_leaves_no_answer_leaves_the_example_out(tokenizer):
    (whole,) = encoded(tokenizer, examples=[24]).kept
    with pytest.raises(UserError, match="no example is left"):
        encoded(tokenizer, examples=[24], max_length=whole.prompt_length, truncation="right")


def test_truncation_error_stops(tokenizer):
    with pytest.raises(UserError, match="raise --max-length"):
        encoded(tokenizer, max_length=12, truncation="error")


def test_empty_answers_are_left_out_by_name(tokenizer):
    class Blank(Sums):
        def target(self, example):
            return " " if example == 24 else "x"

    result = encoded(tokenizer, task=Blank())
    assert result.left_out == {"left out: the answer is empty": [0]}
    assert [e.index for e in result.kept] == [1]


def test_an_answer_of_which_no_token_is_left_is_left_out_by_name(tokenizer):
    class Unseen(Sums):
        def messages(self, example):
            return [{"role": "user", "content": self.asked}] if example == 24 else super().messages(example)

        def target(self, example):
            return "\u200b" if example == 24 else super().target(example)

    import copy

    from tokenizers import normalizers

    bare = copy.deepcopy(tokenizer)
    bare.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    bare.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for Unseen.asked in ("", "24="):  # one end-of-turn token, after no prompt or after one
        result = encoded(bare, task=Unseen())
        assert result.left_out == {"left out: the tokenizer leaves nothing of the answer to learn": [0]}
        assert [e.index for e in result.kept] == [1]


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("target", 7, r"target\(\) gave int"),
        ("messages", "24=", r"messages\(\) gave"),
        ("messages", [{"role": "user"}], r"messages\(\) gave"),
        ("messages", [{"role": "assistant", "content": "x"}], r"messages\(\) ends with an assistant turn"),
        ("target", "a \ud800", "a lone surrogate"),
        ("messages", [{"role": "user", "content": "\udfff"}], "a lone surrogate"),
    ],
)
def test_a_task_that_returns_nonsense_is_named(tokenizer, method, value, message):
    broken = type("Broken", (Sums,), {method: lambda self, example: value})
    with pytest.raises(UserError, match=f"train example 0: {message}"):
        encoded(tokenizer, task=broken())


def test_a_task_that_fails_on_an_example_is_named(tokenizer):
    class Failing(Sums):
        def target(self, example):
            return {24: "x"}[example]

    with pytest.raises(UserError, match="train example 1: the task failed: KeyError: 25"):
        encoded(tokenizer, task=Failing(), examples=[24, 25])


def test_no_chat_template_and_a_template_that_rejects(tokenizer, tmp_path):
    import copy

    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(Source(str(tmp_path), str(tmp_path)), trust_remote_code=False)
    bare.chat_template = "{{ raise_exception('no system role here') }}"
    with pytest.raises(UserError, match=r"rejects these messages .*no system role here"):
        encoded(bare)
