"""The task chat reads rows with a chosen and a rejected answer in every published form, or says why not."""

from __future__ import annotations

import json

import pytest
from chats import jsonl

from accel_sft import RowLeftOut, RowProblem
from accel_sft_chat import Chat
from accel_sft_chat.columns import ONE_SIDED, named_columns
from accel_sft_chat.keys import RowRefused
from accel_sft_chat.task import parse_row

SYSTEM, ASK, ANSWER = ({"role": role, "content": role[:1]} for role in ("system", "user", "assistant"))
AGAIN, WORSE = {"role": "user", "content": "u2"}, {"role": "assistant", "content": "b"}
CALLING = {**ANSWER, "content": "", "tool_calls": [{"type": "function", "function": {"name": "w", "arguments": {}}}]}
THOUGHT = {**WORSE, "reasoning_content": "t"}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": {}}}]
PLAIN, TEXTS = {**ASK, "continued": True}, {"chosen": "a", "rejected": "b"}
TALK, ONE = [ASK, ANSWER, AGAIN], {"chosen": [ANSWER], "rejected": [WORSE]}
WHOLE = {side: [ASK, *turns] for side, turns in ONE.items()}
OPENAI = {"preferred_output": [ANSWER], "non_preferred_output": [WORSE]}
ALPACA = {"instruction": "u", "input": "x", "system": "s", "history": [["u", "a"]], **TEXTS}
SHAREGPT = {"conversations": [{"from": "human", "value": "u"}], "chosen": {"from": "gpt", "value": "a"}}
FORMS = {
    "TRL": ({"prompt": "u", **TEXTS}, [PLAIN]),
    "TRL with messages": ({"prompt": TALK, **ONE}, TALK),
    "TRL without a prompt": ({"chosen": [*TALK, ANSWER], "rejected": [*TALK, WORSE]}, TALK),
    "TRL continued": ({"prompt": [ASK, ANSWER], "chosen": [AGAIN, ANSWER], "rejected": [AGAIN, WORSE]}, TALK),
    "a table": ({key: json.dumps(value) for key, value in {"prompt": TALK, **ONE}.items()}, TALK),
    "UltraFeedback": ({"prompt": "u\n", **WHOLE}, [ASK]),
    "UltraFeedback with messages": ({"prompt": [ASK], **WHOLE}, [ASK]),
    "a whole chat beside an answer": ({**WHOLE, "rejected": "b"}, [ASK]),
    "LLaMA-Factory": (ALPACA, [SYSTEM, ASK, ANSWER, {"role": "user", "content": "u\nx"}]),
    "LLaMA-Factory's ShareGPT": ({**SHAREGPT, "rejected": {"from": "gpt", "value": "b"}}, [ASK]),
    "LLaMA-Factory's messages": ({"messages": TALK, "chosen": ANSWER, "rejected": WORSE}, TALK),
    "Intel": ({"system": "s", "question": "u", **TEXTS}, [SYSTEM, ASK]),
    "Argilla": ({"prompt": "", "instruction": "u", "chosen_response": "a", "rejected_response": "b"}, [ASK]),
    "OpenAI": ({"input": {"messages": TALK, "tools": [], "x": 1}, **OPENAI}, TALK, "x"),
    "ms-swift": ({"messages": [*TALK, ANSWER], "rejected_response": "b"}, TALK),
    "ms-swift with messages": ({"messages": [*TALK, ANSWER], "rejected_messages": [*TALK, WORSE]}, TALK),
    "scores": ({**WHOLE, "rejected": [ASK, {**WORSE, "id": 1}], "margin": 1.5}, [ASK], "margin", "rejected[].id"),
    "another prompt": ({"prompt": "x", **WHOLE}, [ASK], "prompt"),
    "another prompt of messages": ({"prompt": [AGAIN], **WHOLE}, [ASK], "prompt"),
}


@pytest.mark.parametrize("learn", ["every", "marked"])
@pytest.mark.parametrize("case", FORMS.values(), ids=FORMS)
def test_forms_of_pairs_become_prompt_and_two_answers(case, learn):
    row, prompt, *unread = case
    got, task = parse_row((), learn, None, row), Chat(train_file="x")
    assert (task.messages(got.example), got.unread) == (prompt, tuple(unread))
    assert (task.target(got.example), task.rejected(got.example)) == ("a", "b")
    one = parse_row((), "every", None, {"prompt": prompt, "completion": "a"})
    assert (got.group, task.rejected(one.example)) == (one.group, None)  # with the same prompt, held out together


@pytest.mark.parametrize("answers", [(CALLING, WORSE), (ANSWER, CALLING), (ANSWER, THOUGHT)])
def test_pair_keeps_tools_variables_and_one_form_of_answers(answers):
    row, task = dict(zip(("chosen", "rejected"), answers, strict=True)), Chat(train_file="x")
    row |= {"prompt": [ASK], "tools": TOOLS, "chat_template_kwargs": {"x": 1}}
    example = parse_row((), "every", None, row).example
    assert (task.target(example), task.rejected(example)) == ([answers[0]], [answers[1]])
    assert (task.tools(example), task.chat_template_kwargs(example)) == (TOOLS, {"x": 1})


NAMED = {
    "chosen=good,rejected=bad": {"prompt": "u", "good": "a", "bad": "b"},
    "prompt=x,chosen=good": {"x": "u", "prompt": "y", "good": "a", "rejected": "b"},
    "chosen=completion": {"prompt": "u", "completion": "a", "rejected": "b"},
    "messages=talk": {"talk": [ASK], "prompt": "y", **TEXTS},
    "completion=chosen": {"prompt": "u", **TEXTS},
    "output=chosen": {"instruction": "u", **TEXTS},
    "messages=chosen": WHOLE,
}


@pytest.mark.parametrize("names", NAMED)
def test_columns_name_both_answers_or_use_one_alone(names):
    task, got = Chat(train_file="x"), parse_row(named_columns(names), "every", None, NAMED[names])
    assert (got.example.prompt[0]["content"], task.target(got.example)) == ("u", "a")
    alone = names.endswith("=chosen")
    assert (task.rejected(got.example), "rejected" in got.unread) == ((None, True) if alone else ("b", False))
    with pytest.raises(RowRefused, match="a column bda, which --columns names"):
        parse_row(named_columns("rejected=bda"), "every", None, {"prompt": "u", **TEXTS})


HH = "\n\nHuman: u\n\nhm\n\nAssistant: a"
REFUSED = {
    "hh-rlhf": ({"chosen": HH, "rejected": HH}, RowRefused, "to the prompt in another column .* a text is no chat"),
    "hh-rlhf beside a prompt": ({"prompt": "u", "chosen": HH, "rejected": HH}, RowProblem, "a text is no chat"),
    "chats that part early": ({**WHOLE, "rejected": [ASK, WORSE, *TALK]}, RowProblem, "one turn, the assistant's"),
    "a begun answer": ({"messages": [ASK, ANSWER], **ONE}, RowProblem, "a prompt that ends with no assistant turn"),
    "messages beside an instruction": ({"instruction": "u", **ONE}, RowProblem, "a text beside instruction, or --col"),
    "bad messages": ({"messages": "[{", **TEXTS}, RowProblem, r"field 'messages\[0\]'"),
    "images": ({"prompt": "u", **TEXTS, "images": ["a.png"]}, RowRefused, "no images beside chosen and rejected"),
    "no rejected": ({"prompt": "u", "chosen": "a"}, RowLeftOut, ONE_SIDED),
    "an empty text": ({"prompt": "u", **TEXTS, "rejected": " "}, RowLeftOut, ONE_SIDED),
    "an empty message": ({"prompt": [ASK], **ONE, "rejected": [{**WORSE, "content": ""}]}, RowLeftOut, ONE_SIDED),
    "a turn of weight 0": ({"prompt": [ASK], **ONE, "rejected": [{**WORSE, "train": False}]}, RowLeftOut, ONE_SIDED),
}


@pytest.mark.parametrize(("row", "refusal", "words"), REFUSED.values(), ids=REFUSED)
def test_pair_that_cannot_be_compared_is_refused_or_left_out(row, refusal, words):
    with pytest.raises(refusal, match=words):
        parse_row((), "every", None, row)


def test_file_of_pairs_is_read_counted_and_held_out_by_prompt(tmp_path):
    rows = [{"prompt": f"{n // 2}?", "chosen": f"a {n}", "rejected": "None", "score": n} for n in range(40)]
    task = Chat(train_file=jsonl(tmp_path / "rows.jsonl", [*rows, {**rows[0], "chosen": ""}]), held_out=0.2)
    train, validation = task.dataset("train"), task.dataset("validation")
    assert {row.question for row in train}.isdisjoint(row.question for row in validation)
    assert [task.rejected(row) for row in (*train, *validation)] == ["None"] * 40
    read = "40 rows read as prompt and completion (columns prompt, chosen), with a worse answer (column rejected)"
    word, left = (
        "40 rows with a text that is 'None', which is learnt as a word",
        f"1 row left out: {ONE_SIDED} (line 41)",
    )
    assert {read, word, left, "not read: score (40 rows)"} <= {*train.notes}
