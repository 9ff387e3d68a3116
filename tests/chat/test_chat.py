"""Law 2: what carries loss, and what was left out, is known by name."""

from __future__ import annotations

import copy

import pytest
from models import Sums, encode, with_template
from tokenizers import normalizers

from accel_sft import UserError
from accel_sft.chat.encoded import end_of_turn_ids


def encoded(tokenizer, task=None, examples=(24, 31), **rules):
    rules = {"eos_ids": end_of_turn_ids(tokenizer), "max_length": 512, "truncation": "drop", **rules}
    return encode(tokenizer, task or Sums(), examples, "train", **rules)


def test_answer_and_its_end_of_turn_alone_carry_loss(tokenizer):
    (first, _) = encoded(tokenizer).kept
    answer = first.input_ids[first.prompt_length :]
    assert tokenizer.decode(answer) == "the answer is 12 + 12<|im_end|>"
    assert answer[-1] == tokenizer.eos_token_id
    assert first.supervised_tokens == len(answer)
    assert tokenizer.decode(first.input_ids[: first.prompt_length]).endswith("24=<|im_end|>\n<|im_start|>assistant\n")


def test_pad_token_equal_to_end_of_turn_changes_nothing(tokenizer):
    same = copy.deepcopy(tokenizer)
    same.pad_token = same.eos_token
    assert [e.input_ids for e in encoded(same).kept] == [e.input_ids for e in encoded(tokenizer).kept]


@pytest.mark.parametrize(("truncation", "message"), [("right", "no example is left"), ("error", "raise --max-length")])
def test_a_cut_that_leaves_no_answer_leaves_the_example_out(tokenizer, truncation, message):
    (whole,) = encoded(tokenizer, examples=[24]).kept
    with pytest.raises(UserError, match=message):
        encoded(tokenizer, examples=[24], max_length=whole.prompt_length, truncation=truncation)


def test_answer_without_tokens_is_left_out_by_name(tokenizer):
    class Unseen(Sums):
        def messages(self, example):
            return [{"role": "user", "content": self.question}] if example == 24 else super().messages(example)

        def target(self, example):
            return "\u200b" if example == 24 else super().target(example)

    bare = with_template(tokenizer, "{% for m in messages %}{{ m.content }}{% endfor %}")
    bare.backend_tokenizer.normalizer = normalizers.Replace("\u200b", "")
    for Unseen.question in ("", "24="):  # one end-of-turn token, after no prompt or after one
        result = encoded(bare, task=Unseen())
        assert result.left_out == {"left out: the tokenizer leaves nothing of the answer to learn": [0]}
        assert [e.index for e in result.kept] == [1]
