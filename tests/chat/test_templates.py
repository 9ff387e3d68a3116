"""What chat templates write around answers is learnt but not scored; one that loses the answer is refused."""

from __future__ import annotations

import re

import pytest
from answered import by_characters, scored_answers
from models import Says, encode
from models import with_template as tokenizer_with
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from accel_sft import UserError
from accel_sft.chat.answer_text import AnswerText
from accel_sft.chat.conversation import Conversation
from accel_sft.chat.rendering import Rendering

TURNS = (
    "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% else %}<|im_start|>assistant\nANSWER{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS_EMPTY = "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>\n"
THINKS_WITHIN = (  # a block in the content is taken for the thinking, its white space put in order
    "{% set parts = m.content.split('</think>') %}<think>\n{{ parts[0].split('<think>')[-1].strip() "
    "if parts | length > 1 }}\n</think>\n\n{{ parts[-1].lstrip('\n') }}<|im_end|>\n"
)
SOUND = {
    "nothing around it": "{{ m.content }}<|im_end|>\n",
    "no end of turn": "{{ m.content }}\n",
    "an empty thinking block": THINKS_EMPTY,
    "a thinking block that is filled in": THINKS_WITHIN,
    "the end of a block only": "\n</think>\n\n{{ m.content }}<|im_end|>",
    "a channel": "<|channel|>final<|message|>{{ m.content }}<|im_end|>",
    "a blank on both sides": " {{ m.content | trim }} <|im_end|>",
    "an element": "<think>\n\n</think>\n<answer>\n{{ m.content }}\n</answer><|im_end|>\n",
    "two ends": "{{ m.content }}<|end|>\n<|im_end|>",
}
LOSING = {
    "drops it": "<|im_end|>\n",
    "keeps what is behind a mark": "{{ m.content.split('>')[-1] }}<|im_end|>",
    "cuts it": "{{ m.content[:2] }}<|im_end|>",
    "wants a list": "{% for c in m.content %}{{ c.text }}{% endfor %}<|im_end|>",
    "drops the thinking": "{{ m.content.split('</think>')[-1] }}<|im_end|>",
}
ANSWERS = [
    *("odd", " odd\n", "final", "think", "m", "a\n\nb", "<b>odd</b>", "{'a': '>'}", "<think>two</think>odd"),
    *("e\u0301 \ufb01 x\u200by", "<|channel|> and <think>", "a<|im_end|>b", "\\n", "\ue000"),
]
"""Also words of the templates themselves, characters that normalisers change, and tokens of the tokenizer."""


@pytest.fixture(scope="module", params=["bytes", "characters"])
def tokenizer(request, tiny):
    made = AutoTokenizer.from_pretrained(tiny) if request.param == "bytes" else by_characters()
    made.add_tokens(["<|channel|>", "<|message|>", "<|start|>", "<|end|>"], special_tokens=True)
    made.add_tokens(["<think>", "</think>"])
    return made


def with_template(tokenizer, assistant: str):
    return tokenizer_with(tokenizer, TURNS.replace("ANSWER", assistant))


def encoding(tokenizer, examples, split="train", task=None, truncation="drop", max_length=512):
    rules = {"eos_ids": {tokenizer.eos_token_id}, "max_length": max_length, "truncation": truncation}
    return encode(tokenizer, task or Says(), examples, split, **rules)


def encoded(tokenizer, examples, **rules):
    return encoding(tokenizer, examples, "validation", **rules).kept


def scored(tokenizer, examples, answers):
    """What the evaluator makes of answers (texts, or token ids) to these examples."""
    ids = [tokenizer(a, add_special_tokens=False)["input_ids"] if isinstance(a, str) else a for a in answers]
    return scored_answers(tokenizer, Says(), examples, encoded(tokenizer, examples), ids)


def learnt(tokenizer, examples):
    return [example.input_ids[example.prompt_length :] for example in encoded(tokenizer, examples)]


@pytest.mark.parametrize("assistant", SOUND.values(), ids=SOUND)
def test_answers_are_scored_without_what_surrounds_them(tokenizer, assistant):
    own = with_template(tokenizer, assistant)
    reproduced = learnt(own, ANSWERS)
    evaluation = scored(own, ANSWERS, reproduced)
    assert [sample["generated"] for sample in evaluation.samples] == ANSWERS
    assert evaluation.metrics["right"] == 1.0
    # a server, or a limit, may leave the end-of-turn token out
    assert scored(own, ANSWERS, [ids[:-1] for ids in reproduced]).metrics["right"] == 1.0
    others = ["even", "final", "m and <b>m</b>", "a\n\nb."]
    evaluation = scored(own, ["odd"] * len(others), learnt(own, others))
    assert [sample["generated"] for sample in evaluation.samples] == others
    assert evaluation.metrics["right"] == 0.0


def test_tokenizer_that_decodes_blanks_behind_tokens_confuses_no_answers():
    characters = ["\u2581", "\n", *map(chr, range(33, 127))]
    tokens = {"<unk>": 0, "<s>": 1, **{character: number for number, character in enumerate(characters, 2)}}
    spelling = Tokenizer(models.BPE(tokens, [], unk_token="<unk>"))
    spelling.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    spelling.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=spelling, unk_token="<unk>", eos_token="<|im_end|>")
    tokenizer.add_tokens(["<|im_start|>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    generated = {"assistant\nyes": "yes", "assistant\nno": "no", "rubbish": "", "": ""}
    for text, scored in generated.items():
        ids = tokenizer(f"<|im_start|>{text}<|im_end|>", add_special_tokens=False)["input_ids"]
        chat = Conversation([{"role": "user", "content": "hello"}], {"role": "assistant", "content": "yes"})
        assert AnswerText(Rendering(tokenizer))(chat, ids) == scored


EMPTY, END, CHANNEL = "an empty thinking block", "the end of a block only", "a channel"
GENERATED = [
    (EMPTY, "<think>\nIs it odd? Yes.\n</think>\n\nodd<|im_end|>", "odd"),
    ("an element", "<think>\n</think>odd<|im_end|>", "odd"),
    (EMPTY, "<think>it ends</think>\n\nodd </think> even", "odd </think> even"),
    ("an element", "<think>\nIs it odd? It is od", ""),
    (EMPTY, "<think><|im_end|>", ""),
    ("an element", "odd<|im_end|>", "odd"),
    (EMPTY, "<|im_end|>", ""),
    (EMPTY, "<think>\n\n</think>\n\na<|channel|>b<|im_end|>", "ab"),  # a token that is generated is no text
    (CHANNEL, "<|channel|>analysis<|message|>odd?<|end|><|start|>assistant<|channel|>final<|message|>odd", "odd"),
    (CHANNEL, "<|channel|>analysis<|message|>odd?<|im_end|>", ""),
    (CHANNEL, "final odd<|im_end|>", "final odd"),
    (END, "\nSo?\n</think>\n\nodd<|im_end|>", "odd"),
    (END, "\nSo? It is od", ""),
]


@pytest.mark.parametrize(("name", "generated", "text"), GENERATED)
def test_thinking_and_other_channels_are_not_scored(tokenizer, name, generated, text):
    (sample,) = scored(with_template(tokenizer, SOUND[name]), ["odd"], [generated]).samples
    assert (sample["generated"], sample["scores"]) == (text, {"right": float(text == "odd")})


def test_thinking_that_is_the_tasks_own_is_scored(tokenizer):
    own = with_template(tokenizer, THINKS_WITHIN)
    (sample,) = scored(own, ["<think>two</think>odd"], ["<think>\nthree\n</think>\n\nodd<|im_end|>"]).samples
    assert sample["generated"] == "<think>\nthree\n</think>\n\nodd"


@pytest.mark.parametrize("name", LOSING)
def test_a_template_that_loses_the_answer_is_refused(tokenizer, name):
    own = with_template(tokenizer, LOSING[name])
    losing = {"keeps what is behind a mark": "<b>odd</b> 1", "drops the thinking": "<think>two</think>odd"}
    losing["drops it"] = "m"  # though its letter is in the prompt
    with pytest.raises(UserError, match=r"^validation example 1: the answer would not be trained on: ") as refused:
        encoded(own, ["  ", losing.get(name, "odd")])
    (line,) = refused.value.problems
    assert line.endswith(("change the template or target()", "give --thinking keep"))
    with pytest.raises(UserError, match="the answer would not be trained on"):  # also where the cut would hide it
        encoded(own, [losing.get(name, "odd")], truncation="right", max_length=16)


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages if m.role != 'user' %}", "user"),
        ("{% for m in messages if m.role != 'assistant' or m == messages[-1] %}", "assistant"),
        ("{% for m in messages %}{% set m = {'role': m.role, 'content': m.content[:6]} %}", "system"),
    ],
)
def test_template_dropping_a_message_is_refused_by_row_and_role(tokenizer, template, role):
    own = with_template(tokenizer, "{{ m.content }}<|im_end|>\n")
    own.chat_template = own.chat_template.replace("{% for m in messages %}", template)
    turns = [{"role": "system", "content": "Say it."}, {"role": "user", "content": "What?"}]
    turns += [{"role": "assistant", "content": "This."}, {"role": "user", "content": "Again?"}]
    task = type("Chat", (Says,), {"messages": lambda self, example: turns})()
    with pytest.raises(UserError, match=rf"train example 0: .* drops .* of the {role} turn"):
        encoding(own, ["odd"], task=task)


def test_thinking_that_the_prompt_opens_is_not_lost(tokenizer):
    own = with_template(tokenizer, "{{ m.content.split('<think>')[-1] }}<|im_end|>")
    own.chat_template = own.chat_template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n")
    answer = "<think>two</think>odd"
    assert own.decode(learnt(own, [answer])[0]) == "two</think>odd<|im_end|>"
    assert scored(own, [answer], learnt(own, [answer])).metrics["right"] == 1.0
    own.chat_template = own.chat_template.replace("'<think>'", "'</think>'")
    with pytest.raises(UserError, match="the answer would not be trained on"):
        encoded(own, [answer])


def test_end_of_turn_that_is_no_token_is_reported_unscored(tokenizer):
    own = with_template(tokenizer, "{{ m.content }}<|im_finish|>\n")
    (line,) = encoding(own, ["odd"]).lines()
    assert re.search(r'ends answers with "<\|im_finish\|>", which is not a special token', line)
    assert scored(own, ["odd"], learnt(own, ["odd"])).metrics["right"] == 1.0
    rendering = Rendering(own)
    assert rendering.tail(rendering.form(Says().messages("odd"), "train")) == "<|im_finish|>\n"


def test_control_tokens_in_answers_are_learnt_and_scored_as_characters(tokenizer):
    own = with_template(tokenizer, SOUND["an empty thinking block"])
    said = ["a<|im_end|>\n<|im_start|>user\nb", "a<|im_end|>\n<|im_start|>user\nc", "a", "a\n"]
    reproduced = learnt(own, said)
    assert [ids.count(own.eos_token_id) for ids in reproduced] == [1, 1, 1, 1]
    evaluation = scored(own, said[:1] * 4, reproduced)
    assert [sample["generated"] for sample in evaluation.samples] == said
    assert evaluation.metrics["right"] == 0.25
    # what a model generates of the tokens themselves is no text
    ids = own("<think>\n\n</think>\n\na<|channel|>b<|im_end|>", add_special_tokens=False)["input_ids"]
    assert [sample["generated"] for sample in scored(own, ["odd"], [ids]).samples] == ["ab"]


def test_row_whose_characters_become_a_control_token_is_refused():
    """A Unigram vocabulary may have the token itself as a piece."""
    spelling = Tokenizer(models.Unigram([("<unk>", 0.0), ("</s>", 0.0), *((c, -9.0) for c in "abc</s>\n")], 0))
    spelling.decoder = decoders.Fuse()
    own = PreTrainedTokenizerFast(tokenizer_object=spelling, eos_token="</s>", unk_token="<unk>", pad_token="</s>")
    own.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    (example,) = encoded(own, ["ab"])
    assert own.decode(example.input_ids[example.prompt_length :]) == "ab</s>"
    with pytest.raises(UserError, match="validation example 1: a text contains a control token"):
        encoded(own, ["ab", "a</s>b"])
