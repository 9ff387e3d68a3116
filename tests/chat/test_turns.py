"""Tasks whose target is several turns: every answer is learnt as it is generated, in one row where that is exact."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass

import pytest
import torch
from accelerate import Accelerator
from answered import scored_answers
from families import DAY, MODES, NAMES, of_family
from forwards import WAYS, batching_of, loss_and_gradients
from models import Given, encode, with_template
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from accel_sft import UserError, read_rows
from accel_sft.api.config import TrainConfig
from accel_sft.batching.trial import Trial
from accel_sft.batching.verify import exact_batchings
from accel_sft.chat.answer_tokens import AnswerTokens
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import Conversation, conversation, limited_examples
from accel_sft.chat.encoded import Rules
from accel_sft.chat.form import Form
from accel_sft.chat.rendering import Rendered, Rendering
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.evaluation.evaluator import Evaluator
from accel_sft.models.prefix_attention import install as install_attention

install_attention(torch.device("cpu"))


def user(text, **more):
    return {"role": "user", "content": text, **more}


def said(text, **more):
    return {"role": "assistant", "content": text, **more}


SYSTEM = {"role": "system", "content": "Say it."}
CHAT = [SYSTEM, user("What?"), said("odd"), user("And 2?"), said("<b>even</b>"), user("7?"), said("a\n\nb")]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"town": {"type": "string"}}}}]


@dataclass(kw_only=True)
class Chats(Given):
    """Examples are prompt and following turns; those of a text target are a conversation's first turns."""

    def tools(self, example):
        return example[2] if len(example) > 2 else None

    def score(self, example, text):
        return {"right": float(text == example[1][-1]["content"])}


def encoded(own, examples, *, ends=None, thinking="template", split="train", **rules):
    rules = {"max_length": 4096, "truncation": "drop", "day": DAY, **rules}
    return encode(own, Chats(), examples, split, eos_ids=ends or {own.eos_token_id}, thinking=thinking, **rules)


def chatml(tokenizer, assistant="{{ m.content }}", prompt=""):
    return with_template(
        tokenizer,
        "{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% else %}<|im_start|>assistant\n" + assistant + "<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + prompt + "{% endif %}",
    )


FORGETFUL = (  # as Qwen3's: the thinking of an answer is written until the user speaks again
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role != 'assistant' %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>assistant\n{% set parts = m.content.split('</think>') %}"
    "{% if loop.index0 > ns.asked %}<think>\n{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 }}\n"
    "</think>\n\n{% endif %}{{ parts[-1].lstrip('\n') }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# --- every family of templates ---

ALWAYS_APART = {
    "DeepSeek-R1",  # prompts open a block that earlier answers do not have
    "GLM-4.5",  # the end of a turn is written nowhere: it is added to what is learnt
    "Mistral v0.3",  # the system text moves on to each last turn
}
APART = {
    "template": ALWAYS_APART | {"Gemma 4", "Qwen3.5"},
    "off": ALWAYS_APART | {"Gemma 4"},
    "keep": ALWAYS_APART | {"DeepSeek-V3.1", "Granite 3.3", "Qwen3.5"},
}
"""Families that write an answer otherwise once others follow, or prompts otherwise than what precedes an answer."""


@pytest.mark.parametrize("thinking", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_every_answer_is_learnt_as_answer_to_its_predecessors(tokenizer, name, thinking):
    own, ends = of_family(tokenizer, name)
    for chat, first in ((CHAT, 2), (CHAT[1:], 1)):  # with a system turn, and without
        single = [(chat[:at], chat[at]["content"]) for at in range(first, len(chat), 2)]
        single = encoded(own, single, ends=ends, thinking=thinking)
        chats = encoded(own, [(chat[:first], chat[first:])], ends=ends, thinking=thinking)
        answers = [(row.input_ids[:end], begin) for row in chats.kept for begin, end in row.spans]
        assert answers == [(row.input_ids, row.prompt_length) for row in single.kept]
        assert chats.kept[-1].input_ids == single.kept[-1].input_ids
        assert first == 1 or (len(chats.kept) == 1) == (name not in APART[thinking])
        assert sum(row.supervised_tokens for row in chats.kept) == sum(row.supervised_tokens for row in single.kept)


@pytest.mark.parametrize("name", ["Qwen3", "Gemma 3", "Llama 3.2"])
def test_single_row_is_the_rendering_and_begins_with_every_prompt(tokenizer, name):
    own, ends = of_family(tokenizer, name)
    own.chat_template = own.chat_template.replace("strftime_now is defined", "false")
    (row,) = encoded(own, [(CHAT[:2], CHAT[2:])], ends=ends).kept
    whole = own.apply_chat_template(CHAT, return_dict=False)
    assert whole[: len(row.input_ids)] == row.input_ids
    for at, (begin, _) in zip((2, 4, 6), row.spans, strict=True):
        prompt = own.apply_chat_template(CHAT[:at], add_generation_prompt=True, return_dict=False)
        assert row.input_ids[:begin] == prompt


def test_generation_marks_make_no_difference_and_are_transformers_own_mask(tokenizer):
    marked = chatml(tokenizer, "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
    end = "{% endgeneration %}"
    marked.chat_template = marked.chat_template.replace(f"{end}<|im_end|>\n", f"{end}{{{{ '\n' }}}}")
    (row,), (plain,) = (encoded(own, [(CHAT[:2], CHAT[2:])]).kept for own in (marked, chatml(tokenizer)))
    assert row == plain
    theirs = marked.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    ours = [at for span in row.learnt for at in span]
    assert ours == [at for at, is_answer in enumerate(theirs["assistant_masks"]) if is_answer]


# --- which turns ---


def test_turns_of_weight_0_and_of_others_carry_no_loss(tokenizer):
    own = chatml(tokenizer)
    turns = [user("What?"), said("odd", weight=0), user("And?"), said("even", weight=1), user("So?"), said("no")]
    first, second = encoded(own, [([], turns), ([], [*turns[:-1], said("no", weight=0)])]).kept
    assert [own.decode(first.input_ids[begin:end]) for begin, end in first.spans] == ["even<|im_end|>", "no<|im_end|>"]
    assert own.decode(second.input_ids[second.prompt_length :]) == "even<|im_end|>"
    assert (second.earlier, len(second.input_ids)) == ((), first.spans[0][1])  # what follows teaches nothing
    assert "'weight'" not in str(conversation(Chats(), [([], turns)], "train", 0))


@pytest.mark.parametrize(
    ("messages", "target", "message"),
    [
        ([said("x")], "5", "messages() ends with an assistant turn"),
        ("5=", "5", "messages() gave"),
        ([user("5=")], [said(None)], "target() gave"),
        ([user("\udfff")], "5", "a text has a lone surrogate"),
        ([user("5=")], 5, "target() gave int"),
        ([], [], "target() gave turns that do not end with an assistant turn"),
        ([user("5=")], [said("5", weight=0.5)], 'a turn with "weight": 0.5, expected 0 or 1'),
        ([user("5=")], [said("5", weight=0)], 'every assistant turn of target() has "weight": 0'),
        ([], [said("5")], "the first turn is an answer to nothing; put a user turn"),
        ([user("5="), said("5", weight=1)], [user("6="), said("6")], 'messages() gave a turn with "weight"'),
        ([user("5=")], [{"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": "{"}]}], "call"),
        ([user("5=", tool_calls=[CALL])], [said("5")], "only an assistant calls"),
        ([user("5=")], [said("5", reasoning_content=5)], "reasoning_content '5', expected text"),
    ],
)
def test_turns_that_are_none_are_refused_by_example(messages, target, message):
    with pytest.raises(UserError, match=r"^train example 1: ") as refused:
        conversation(Chats(), [(messages, target)] * 2, "train", 1)
    assert message in str(refused.value)
    with pytest.raises(UserError, match=r"^train example 0: tools\(\) gave 'weather', expected a list of schemas"):
        conversation(Chats(), [([user("5=")], "5", "weather")], "train", 0)


# --- templates that write earlier answers otherwise ---


def test_template_that_forgets_thinking_makes_a_row_per_answer(tokenizer, own_cache):
    own = with_template(tokenizer, FORGETFUL)
    looped = [user("What?"), said("It is"), {"role": "tool", "content": "3"}, said("odd")]
    examples = [([SYSTEM], CHAT[1:5]), ([SYSTEM], looped), ([SYSTEM], CHAT[1:3])]
    rules = Rules(frozenset([own.eos_token_id]), 512, "drop")
    for _ in range(2):  # made, and from the cache
        encoding = SplitEncoder(Accelerator(cpu=True), own, Chats(), rules)(examples, "train")
        (line,) = [line for line in encoding.lines() if "rows" in line]
        assert line.startswith("train: 3 examples make 4 rows: the chat template writes an answer differently once")
        assert [(row.index, len(row.spans)) for row in encoding.kept] == [(0, 1), (0, 1), (1, 2), (2, 1)]
        assert list(encoding.kept) == encoded(own, examples).kept
        assert (encoding.kept.examples, len(encoding.kept.of(0)), len(encoding.kept.of(3))) == (3, 2, 0)
    first, second = (own.decode(row.input_ids) for row in encoding.kept.of(0))
    assert first.endswith("assistant\n<think>\n\n</think>\n\nodd<|im_end|>")
    assert "assistant\nodd<|im_end|>\n" in second


def test_thinking_in_its_own_field_is_learnt_or_refused(tokenizer):
    thoughtful = [user("What?"), said("odd", reasoning_content="Is it?"), user("2?"), said("<think>No.</think>even")]
    own, ends = of_family(tokenizer, "Qwen3")
    for thinking in ("keep", "template"):
        (row,) = encoded(own, [([SYSTEM], thoughtful)], ends=ends, thinking=thinking).kept
        learnt = [own.decode(row.input_ids[begin:end]) for begin, end in row.spans]
        assert learnt == ["<think>\nIs it?\n</think>\n\nodd<|im_end|>", "<think>\nNo.\n</think>\n\neven<|im_end|>"]
    with pytest.raises(UserError, match=r"^train example 0: the answer would not .* --thinking keep"):
        encoded(tokenizer, [([SYSTEM], thoughtful)])


# --- tools ---

CALLING = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls %}<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLED = [
    user("Rain?"),
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "dry", "tool_call_id": "call00001"},
    said("No."),
]


def test_calls_of_tools_are_learnt_and_their_results_are_not(tokenizer):
    own = with_template(tokenizer, CALLING)
    (row,) = encoded(own, [([], CALLED, TOOLS)]).kept
    learnt = [own.decode(row.input_ids[begin:end]) for begin, end in row.spans]
    assert learnt == ['<call>weather {"town": "Ulm"}</call><|im_end|>', "No.<|im_end|>"]
    assert own.decode(row.input_ids).startswith(f"<|im_start|>tools\n{json.dumps(TOOLS)}<|im_end|>\n<|im_start|>user")
    called = [([], CALLED[:2], TOOLS)]
    encoding = encoded(own, called, split="validation")
    learnt = encoding.kept[0].input_ids[encoding.kept[0].prompt_length :]
    (sample,) = evaluated(own, encoding, called, [learnt]).samples
    assert sample["generated"] == sample["expected"] == '<call>weather {"town": "Ulm"}</call>'


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("call.function.arguments", "writes the arguments of calls as Python"),
        ("'' + call.function.arguments", "fails on"),
    ],
)
def test_templates_that_expect_arguments_as_text_are_refused(tokenizer, written, problem):
    own = with_template(tokenizer, CALLING.replace("call.function.arguments | tojson", written))
    with pytest.raises(UserError, match=f"^train example 1: the model's chat template {problem}"):
        encoded(own, [(CHAT[:2], CHAT[2:]), ([], CALLED, TOOLS)])
    with pytest.raises(UserError, match=problem):
        Rendering(own).prompt(conversation(Chats(), [([], CALLED)], "train", 0).turns)


def test_result_that_quotes_its_call_as_python_is_no_argument(tokenizer):
    quoting = [*CALLED[:2], {**CALLED[2], "content": "called with {'town': 'Ulm'}"}, *CALLED[3:]]
    assert len(encoded(with_template(tokenizer, CALLING), [([], quoting, TOOLS)]).kept) == 1


def test_rows_with_tools_are_learnt_by_the_template_of_tools(tokenizer):
    own = with_template(tokenizer, {"default": chatml(tokenizer).chat_template, "tool_use": CALLING})
    encoding = encoded(own, [([], CALLED, TOOLS), (CHAT[:2], CHAT[2:3])])
    called, plain = (own.decode(row.input_ids) for row in encoding.kept)
    turns = [{**turn, "content": turn["content"] or ""} for turn in CALLED]
    turns[1] = {**turns[1], "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"town": "Ulm"}}}]}
    assert called + "\n" == own.apply_chat_template(turns, tools=TOOLS, tokenize=False)
    assert "tools" not in plain
    assert encoding.notes == []
    prompt = Rendering(own).prompt(CALLED[:1], tools=TOOLS)
    assert prompt.startswith("<|im_start|>tools") == called.startswith("<|im_start|>tools") is True


def test_control_tokens_in_tools_printed_as_python_are_characters(tokenizer):
    own = with_template(tokenizer, CALLING.replace("tools | tojson", "tools"))
    tools, turns = (json.loads(json.dumps(part).replace("Ulm", "<|im_end|>")) for part in (TOOLS, CALLED[:2]))
    tools[0]["function"]["description"] = "a<|im_end|>b"
    (row,) = encoded(own, [([], turns, tools)]).kept
    text = own.decode(row.input_ids)
    assert "'description': 'a<|im_end|>b'" in text
    assert 'weather {"town": "<|im_end|>"}</call>' in text
    assert row.input_ids.count(own.eos_token_id) == text.count("<|im_end|>") - 2


@pytest.mark.parametrize(
    ("place", "expected"),
    [("call", {"answers": [0], "texts": []}), ("schema", {"answers": [], "texts": [0]})]
    + [(place, {"answers": [], "texts": [0]}) for place in ("unlearnt call", "thinking", "name")],
)
def test_an_end_forged_outside_contents_is_seen(tokenizer, place, expected):
    own = with_template(tokenizer, CALLING)
    tools, turns = (json.loads(json.dumps(part)) for part in (TOOLS, [*CALLED, user("Sure?"), said("Yes.")]))
    end = own.eos_token
    if place == "schema":
        tools[0]["function"]["parameters"] = {end: 1}
    elif place == "thinking":
        turns[1] |= {"weight": 0, "reasoning_content": end}
    elif place == "name":
        turns[2]["name"] = end
    else:
        turns[1] |= {"tool_calls": [json.loads(json.dumps(CALL).replace("Ulm", end))], "weight": int(place == "call")}
    assert encoded(own, [([], turns, tools)]).control_tokens == expected


def test_a_control_token_with_a_quote_is_seen_in_calls(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.add_special_tokens({"additional_special_tokens": ['<|"|>']})  # as Gemma 4's
    call = {**CALL, "function": {"name": "weather", "arguments": {"town": '<|"|>'}}}
    chat = Conversation([user("Rain?")], said("", tool_calls=[call]), tools=None)
    assert ControlTokens(own).written(chat, set()) is not None


def test_template_dropping_calls_is_refused_and_without_tools_reported(tokenizer):
    own = chatml(tokenizer)
    with pytest.raises(UserError, match=r"^train example 1: the answer would not be trained on: .*, with weather"):
        encoded(own, [(CHAT[:2], CHAT[2:]), ([], CALLED)])
    notes = encoded(own, [(CHAT[:2], CHAT[2:], TOOLS)]).notes
    assert notes == ["warning: the chat template does not use tools, so prompts lack what tools() gives"]


def test_template_rejecting_an_order_of_turns_names_the_example(tokenizer):
    own, ends = of_family(tokenizer, "Gemma 2")
    with pytest.raises(UserError, match=r"^train example 2: the model's chat template rejects .*roles user/user"):
        encoded(own, [(CHAT[:2], CHAT[2:]), ([], CHAT[1:3]), ([], [user("a"), user("b"), said("c")])], ends=ends)


# --- --max-length ---


def test_long_chat_is_left_out_or_cut_in_answers(tokenizer):
    own = chatml(tokenizer)
    chat = [(CHAT[:2], CHAT[2:])]
    (whole,) = encoded(own, chat).kept
    first, second, third = whole.spans
    for length, expected in {
        len(whole.input_ids): (whole.input_ids, whole.spans),
        third[0] + 1: (whole.input_ids[: third[0] + 1], (first, second, (third[0], third[0] + 1))),
        third[0]: (whole.input_ids[: second[1]], (first, second)),
        second[1] - 1: (whole.input_ids[: second[1] - 1], (first, (second[0], second[1] - 1))),
        first[1]: (whole.input_ids[: first[1]], (first,)),
    }.items():
        encoding = encoded(own, chat, max_length=length, truncation="right")
        assert [(row.input_ids, row.spans) for row in encoding.kept] == [expected]
        assert encoding.cut == [0] * (length < len(whole.input_ids))
    assert "cut to --max-length" in encoding.lines()[0]
    for length, truncation in ((first[0], "right"), (len(whole.input_ids) - 1, "drop")):
        with pytest.raises(UserError, match=f"1 left out: longer than --max-length {length}"):
            encoded(own, chat, max_length=length, truncation=truncation)
    short = (CHAT[:2], CHAT[2:3])
    # of a validation example the last answer is generated: without its prompt it is none
    held_out = encoded(own, [*chat, short], max_length=third[0], truncation="right", split="validation")
    assert [row.index for row in held_out.kept] == [1]


def test_texts_are_tokenized_in_pieces_only_where_exact():
    pieces = {piece: at for at, piece in enumerate(["a", "b", "<", "s", ">", "b<"])}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(pieces, [("b", "<")])))
    tokenizer.add_tokens(["<s>"], special_tokens=True)
    texts = [Rendered(*pair, "", Form()) for pair in (("ab", "<s>a"), ("ab<s>a", "b<s>b"), ("b<s>", "b"))]
    for split_special_tokens in (False, True):  # the latter reads "b<" across the beginning of a special token
        tokenizer.split_special_tokens = split_special_tokens
        written = [part for text in texts for part in (text.prompt, text.prompt + text.rest)]
        whole = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in written]
        assert (pieces["b<"] in whole[3]) == split_special_tokens
        tokens = AnswerTokens(Rendering(with_template(tokenizer, "x")), frozenset()).of_texts(texts, [2, 1])
        assert [ids for pair in tokens for ids in pair] == whole


# --- the mathematics ---


def plain_loss_and_gradients(model, answers):
    """By transformers alone, each answer in a row of its own: the sum over tokens with a loss."""
    model, total = copy.deepcopy(model), 0.0
    for ids, begin in answers:
        labels = torch.tensor([[-100] * begin + ids[begin:]])
        loss = model(input_ids=torch.tensor([ids]), labels=labels).loss * (len(ids) - begin)
        loss.backward()
        total += loss.item()
    return total, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("way", WAYS)
def test_gradient_of_three_turns_is_that_of_single_rows(tokenizer, model, way):
    own = chatml(tokenizer)
    again = [*CHAT[:4], said("no"), user("7?"), said("odd")]  # begins alike, so that spans lie in what is shared
    partly = [CHAT[2] | {"weight": 0}, *CHAT[3:5]]
    examples = [(CHAT[:2], CHAT[2:]), (again[:2], again[2:]), (CHAT[:2], "even"), (CHAT[:2], partly)]
    rows = encoded(own, examples).kept
    assert [len(row.spans) for row in rows] == [3, 3, 1, 1]
    answers = [
        (own.apply_chat_template(chat[:at], add_generation_prompt=True, return_dict=False), chat[at]["content"])
        for chat, places in ((CHAT, (2, 4, 6)), (again, (2, 4, 6)), ([*CHAT[:2], said("even")], (2,)), (CHAT, (4,)))
        for at in places
    ]
    ids = [(prompt + own(f"{text}<|im_end|>")["input_ids"], len(prompt)) for prompt, text in answers]
    expected, expected_gradients = plain_loss_and_gradients(model, ids)
    total = sum(len(row) - begin for row, begin in ids)
    assert sum(row.supervised_tokens for row in rows) == total
    assert len(batching_of(way, 4096).batch(rows, 0, torch.device("cpu")).targets) == total
    got, gradients = loss_and_gradients(model, batching_of(way, 4096), rows)
    assert got == pytest.approx(expected, rel=1e-5)
    largest = max(gradient.abs().max() for gradient in expected_gradients.values())
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= 1e-5 * largest, name


def test_continued_chat_is_no_row_that_another_sees(tokenizer, model):
    own = chatml(tokenizer)
    rows = encoded(own, [(CHAT[:2], CHAT[2:at]) for at in (3, 5, 7)]).kept
    assert rows[2].input_ids[: len(rows[0].input_ids)] == rows[0].input_ids
    config = TrainConfig(batching="shared").resolved({})
    exact, reasons = exact_batchings(Trial(Accelerator(cpu=True), model, config, rows, 0), rows)
    assert {batching.attention for batching in exact} == {"rows"}, reasons


# --- evaluation ---


def evaluated(own, encoding, examples, answers):
    return scored_answers(own, Chats(), examples, encoding.kept, answers, template_date=DAY)


@pytest.mark.parametrize("template", [None, FORGETFUL])
def test_last_learnt_turn_alone_is_generated_and_scored(tokenizer, template):
    own = with_template(tokenizer, template) if template else chatml(tokenizer)
    examples = [(CHAT[:2], CHAT[2:]), (CHAT[:2], CHAT[2:5])]
    encoding = encoded(own, examples, split="validation")
    assert len(encoding.kept) == (5 if template else 2)
    ids = [own(f"{text}<|im_end|>")["input_ids"] for text in ("a\n\nb", "odd")]
    evaluation = evaluated(own, encoding, examples, ids)
    samples = [(sample["index"], sample["generated"], sample["expected"]) for sample in evaluation.samples]
    assert samples == [(0, "a\n\nb", "a\n\nb"), (1, "odd", "<b>even</b>")]
    assert evaluation.metrics["right"] == 0.5
    config = TrainConfig(eval_limit=1).resolved({})
    evaluator = Evaluator(Accelerator(cpu=True), own, Chats(), examples, encoding.kept, config, None)
    rows = [row for row in encoding.kept if row.index == evaluator.answered[0].index]
    assert (list(evaluator.encoded), evaluator.answered) == (rows, rows[-1:]), "--eval-limit counts examples, not rows"


# --- what is shown, and how much is trained on ---


def test_the_prompt_of_an_answer_is_shown_turn_by_turn():
    prompt, answer = [SYSTEM, user("Who?")], said("I.")
    assert Conversation(prompt, answer).shown_prompt == "Who?"
    call = {"function": {"name": "find", "arguments": {"of": "it"}}}
    turns = [said("", tool_calls=[call]), {"role": "tool", "content": "5"}]
    lines = ["user: Who?", 'assistant: {"name": "find", "arguments": {"of": "it"}}', "tool: 5"]
    assert Conversation([*prompt, *turns], answer).shown_prompt.split("\n") == lines


@pytest.mark.parametrize(("limit", "left"), [(None, 25), ("7", 7), ("900", 25), ("0.1%", 1), ("29%", 7)])
def test_train_limit_takes_the_first_examples_of_any_sequence(limit, left):
    class Squares:
        def __len__(self):
            return 25

        def __getitem__(self, at):
            return at**2  # a slice is an error

    assert [*limited_examples([*range(25)], limit)] == [*range(25)][:left]
    limited = limited_examples(Squares(), limit)
    assert [limited[at] for at in range(len(limited))] == [at**2 for at in range(left)]


def test_train_limit_draws_rows_of_a_file_sorted_by_label(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"label": {n // 50}, "n": {n}}}\n' for n in range(200)))
    rows = read_rows(tmp_path / "rows.jsonl", dict)
    few, more, again = (limited_examples(rows, limit) for limit in ("20", "20%", "20"))
    assert [len(few), len(more), *{row["label"] for row in few}] == [20, 40, 0, 1, 2, 3]
    assert [*few] == [*again] == sorted(few, key=lambda row: row["n"])
    assert all(row in more for row in few), "a larger sample has the smaller one's rows"
    assert [place.line - 1 for place in few.places(range(20))] == [row["n"] for row in few]
    assert few.notes == rows.notes


@pytest.mark.parametrize("limit", ["0", "100.1%", "some"])
def test_train_limit_neither_number_nor_share_is_refused(limit):
    (line,) = TrainConfig(train_limit=limit).problems()
    assert line.startswith(f"--train-limit {limit}: expected a number of examples, or a share")
