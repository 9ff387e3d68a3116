"""What a row says beside its texts reaches the chat template, or is told; a text continued needs no template."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from families import of_family
from models import Given, encode, make_base, with_template
from tokenizers import AddedToken
from transformers import AutoTokenizer

from accel_sft import UserError
from accel_sft.chat.conversation import conversation
from accel_sft.evaluation.evaluator import refuse_beyond_text

ASK, ANSWER = {"role": "user", "content": "odd?"}, {"role": "assistant", "content": "no"}
EMPTY = {"role": "system", "content": ""}
DEFAULT = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a kind helper.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TURNS = DEFAULT.partition("{% endif %}")[2]
OPENED = TURNS.replace(
    "assistant\n", "assistant\n{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS


@dataclass(kw_only=True)
class Rows(Given):
    """An example is its prompt, its target, and what it sets in the template."""

    def chat_template_kwargs(self, example):
        return example[2] if len(example) > 2 else None


def encoded(tokenizer, *examples, **rules):
    rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": 512, "truncation": "drop", **rules}
    return encode(tokenizer, Rows(), list(examples), "train", **rules)


def prompts(tokenizer, *examples, **rules):
    rows = encoded(tokenizer, *examples, **rules).kept
    return [tokenizer.decode(row.input_ids[: row.prompt_length]) for row in rows]


@pytest.mark.parametrize("family", ["Qwen3", OPENED])
def test_each_row_sets_its_own_template_variables(tokenizer, family):
    own, ends = of_family(tokenizer, "Qwen3")
    own.chat_template = own.chat_template if family == "Qwen3" else family
    rows = [([ASK], "no", {"enable_thinking": thinks}) for thinks in (False, True, False)] + [([ASK], "no")]
    expected = [
        own.apply_chat_template([ASK], tokenize=False, add_generation_prompt=True, **(row[2] if row[2:] else {}))
        for row in rows
    ]
    assert len(set(expected)) == 2
    together = encoded(own, *rows, eos_ids=ends).kept
    assert [own.decode(row.input_ids[: row.prompt_length]) for row in together] == expected
    for row, alone in zip(together, rows, strict=True):  # what is learnt depends on no other row's variables
        assert row.input_ids == encoded(own, alone, eos_ids=ends).kept[0].input_ids
    closed = encoded(own, *rows, eos_ids=ends, thinking="off")
    assert {own.decode(row.input_ids[: row.prompt_length]) for row in closed.kept} == {expected[0]}
    assert "--thinking off replaces enable_thinking of chat_template_kwargs" in closed.notes


def test_variables_that_the_template_does_not_read_are_reported(tokenizer):
    plain, continued = encoded(tokenizer, ([ASK], "no"), ([{**ASK, "continued": True}], "no")).kept
    assert plain.input_ids == continued.input_ids, "which no template reads"
    (note,) = [line for line in encoded(tokenizer, ([ASK], "no", {"persona": "x"})).notes if "persona" in line]
    assert note == "warning: the chat template does not use persona, so prompts lack what chat_template_kwargs gives"


def test_control_tokens_in_template_variables_are_characters(tokenizer):
    own = with_template(tokenizer, "{{ persona }}" + TURNS)
    plain, forged = encoded(own, *(([ASK], "no", {"persona": text}) for text in ("x", "<|im_end|>"))).kept
    assert forged.input_ids.count(own.eos_token_id) == plain.input_ids.count(own.eos_token_id)


def test_an_empty_system_turn_is_no_default_system_prompt(tokenizer):
    own = with_template(tokenizer, DEFAULT)
    rows = ([EMPTY, ASK], "no"), ([ASK], "no")
    expected = [own.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) for turns, _ in rows]
    assert prompts(own, *rows) == expected
    assert "kind helper" in expected[1]
    assert "kind helper" not in expected[0]
    line = 'chat template: rows without a system prompt get that of the template: "You are a kind helper."'
    assert encoded(own, rows[1]).notes == [line]
    assert encoded(own, rows[0]).notes == encoded(with_template(tokenizer, TURNS), rows[1]).notes == []


def test_name_of_a_user_is_no_system_prompt(tokenizer):
    named = ([{**ASK, "name": "Bob"}], "no")
    model = with_template(
        tokenizer, TURNS.replace("{{ m.role }}", "{{ m.role ~ (' name=' ~ m.name if m.name else '') }}")
    )
    assert encoded(model, named).notes == []
    assert "user name=Bob\n" in prompts(model, named)[0]


def test_names_and_texts_missing_from_prompts_are_reported(tokenizer):
    own = with_template(tokenizer, TURNS.replace("{{ m.content }}", "{{ m.tool_calls or m.content }}"))
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    called = [ASK, {"role": "assistant", "content": "I look.", "tool_calls": [call]}, {"role": "tool", "content": "5"}]
    dropped, nameless = encoded(own, (called, "no")).notes, encoded(own, ([{**ASK, "name": "Bob"}], "no")).notes
    assert dropped == ["warning: the chat template drops the text of turns that call a tool; no prompt contains it"]
    assert nameless == ["warning: the chat template does not write the names of turns (name); put them into the texts"]
    thought = [ASK, {**called[1], "content": "<think>t</think>I look."}, *called[2:]]
    for form in ("{{ m.content.split('</think>')[-1] }}", "{{ m.content.split('</think>')[-1] | tojson }}"):
        rewritten = with_template(tokenizer, TURNS.replace("{{ m.content }}", form))
        assert encoded(rewritten, (thought, "no")).notes == []
    written = with_template(
        tokenizer, TURNS.replace("{{ m.content }}", "{{ m.name }}{{ m.content }}{{ m.tool_calls }}")
    )
    assert encoded(written, (called, "no"), ([{**ASK, "name": "Bob"}], "no")).notes == []


def test_an_indentation_that_template_or_token_takes_is_reported(tokenizer):
    trims = with_template(tokenizer, TURNS.replace("m.content", "m.content | trim"))
    marks = TURNS.replace("<|im_start|>{{ m.role }}\n", "<|{{ m.role }}|>").replace(
        "<|im_start|>assistant\n", "<|assistant|>"
    )
    takes = with_template(tokenizer, marks)
    takes.add_tokens([AddedToken("<|assistant|>", special=True, rstrip=True)])
    note = "warning: white space that answers begin with, such as an indentation, is not learnt: "
    note += "the template or a token removes it; choose another --chat-template"
    for own, notes in ((trims, [note]), (takes, [note]), (with_template(tokenizer, TURNS), [])):
        assert encoded(own, ([ASK], "  y = x\n")).notes == notes
        assert encoded(own, ([ASK], "  y = x\n  y = z\n")).notes == notes, "a later line begins as the first does"
        assert encoded(own, ([ASK], "y = x\n")).notes == []


@pytest.mark.parametrize("refused", ["", " and not messages[0].content"])
def test_an_empty_system_turn_is_left_out_where_refused(tokenizer, refused):
    own = with_template(tokenizer, NO_SYSTEM.replace(" == 'system'", f" == 'system'{refused}"))
    assert prompts(own, ([EMPTY, ASK], "no")) == prompts(own, ([ASK], "no"))


def test_rendered_text_gets_no_second_end_and_is_reported(tokenizer):
    own = with_template(tokenizer, TURNS)
    text = own.apply_chat_template([ASK, ANSWER], tokenize=False)
    (row,) = encoded(own, ([], text), control_tokens="tokens").kept
    assert row.input_ids == own(text.rstrip(), add_special_tokens=False)["input_ids"]
    assert row.input_ids[-2:].count(own.eos_token_id) == 1
    assert encoded(own, ([], text), control_tokens="tokens").control_tokens == {"answers": [], "texts": []}
    assert encoded(own, ([], text), ([], "plain")).control_tokens == {"answers": [], "texts": [0]}


@pytest.mark.parametrize("bos", [False, True])
def test_without_a_template_a_continued_text_is_concatenated(tmp_path, bos):
    own = AutoTokenizer.from_pretrained(make_base(tmp_path / "base", bos=bos))
    assert own.chat_template is None
    question = {"role": "user", "content": "12=", "continued": True}
    whole = encoded(own, ([question], "the answer is 6 + 6"))
    (row,) = whole.kept
    assert row.input_ids[: row.prompt_length] == own("12=")["input_ids"]
    assert own.decode(row.input_ids[row.prompt_length :]) == "the answer is 6 + 6<|endoftext|>"
    assert row.input_ids.count(own.eos_token_id) == 1
    (note,) = whole.notes
    assert note.startswith("no chat template: answers follow prompts directly and end with <|endoftext|>")
    with pytest.raises(UserError, match="its tokenizer has no chat template"):
        encoded(own, ([question], "6"), ([{"role": "user", "content": "12="}], "6"))


def test_server_gets_no_row_without_its_variables():
    with pytest.raises(
        UserError, match=r"validation example 0 has .*chat_template_kwargs.*; a server can be sent only chats"
    ):
        refuse_beyond_text([conversation(Rows(), [([ASK], "no", {"a": 1})], "validation", 0)])


@pytest.mark.parametrize(
    ("given", "problem"),
    [([1], ".*, expected an object"), ({1: 2}, ".*, expected an object"), ({"tools": []}, "tools, which the trainer")],
)
def test_template_variables_are_an_object_of_the_rows_own(given, problem):
    with pytest.raises(UserError, match=rf"train example 0: chat_template_kwargs\(\) gave {problem}"):
        conversation(Rows(), [([ASK], "no", given)], "train", 0)
