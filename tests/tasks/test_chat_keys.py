"""Every key of a row that would change what is learnt is read, refused by name, or named as not read."""

from __future__ import annotations

import json
import re

import pytest
from chats import jsonl

from accel_sft import RowLeftOut, RowProblem, UserError
from accel_sft.chat.conversation import conversation
from accel_sft_chat import Chat
from accel_sft_chat.keys import AS_JSON, RowRefused, without_numbers
from accel_sft_chat.messages import OTHERS_MARKED
from accel_sft_chat.task import parse_row
from accel_sft_chat.turns import JOINED

SYSTEM, ASK, ANSWER = ({"role": role, "content": role[:1]} for role in ("system", "user", "assistant"))
EMPTY = {"role": "system", "content": ""}
AGAIN, MORE = {"role": "user", "content": "u2"}, {"role": "assistant", "content": "a2"}
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
USED = {"name": "w", "input": {}}
SCHEMA = {"name": "w", "description": "d", "parameters": {"type": "object"}}


def messages(*turns, **columns):
    return {"messages": list(turns), **columns}


def sharegpt(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


def said(**more):
    return messages(ASK, {**ANSWER, **more})


def parsed(row, columns=(), **options):
    return parse_row(columns, "every", None, row, **{"strict": False, **options})


def text(words, **more):
    return {"type": "text", "text": words, **more}


SYSTEM_COLUMNS = {"parts": [text("s")], "a message": SYSTEM, "messages as JSON": json.dumps([SYSTEM])}
PLAIN = {
    "parts marked as learnt": said(content=[text("a", train=True, weight=1)]),
    "a refusal": said(content=None, refusal="a"),
    "Qwen's parts without types": messages({**ASK, "content": [{"text": "u"}]}, ANSWER),
    "conversation": {"conversation": [ASK, ANSWER], "chosen": None, "rejected": ""},
    "parts of responses": messages({**ASK, "content": [{"type": "input_text", "text": "u"}]}, ANSWER),
    "a request of OpenAI's batches": {"body": messages(ASK, ANSWER), "method": None},
    "one message for a list": {"prompt": [ASK], "completion": ANSWER},
    "conversations beside empty messages": {"messages": [], "conversations": [ASK, ANSWER]},
}
THINKING = {
    "thinking": said(thinking="t"),
    "reasoning": said(reasoning="t", thinking=""),
    "thinking in parts of a part": said(content=[{"type": "thinking", "thinking": [text("t")]}, text("a")]),
}
CALLING = [{"role": "assistant", "content": "", "tool_calls": [CALL]}]
READ = {
    **{
        f"a system column of {form}": (messages(ASK, ANSWER, system=system), [SYSTEM, ASK], [ANSWER])
        for form, system in SYSTEM_COLUMNS.items()
    },
    "system_prompt beside an empty system": (
        messages(ASK, ANSWER, system_prompt="s", system=" "),
        [SYSTEM, ASK],
        [ANSWER],
    ),
    "an empty system turn": (messages(EMPTY, ASK, ANSWER), [EMPTY, ASK], [ANSWER]),
    **{form: (row, [ASK], [ANSWER]) for form, row in PLAIN.items()},
    **{form: (row, [ASK], [{**ANSWER, "reasoning_content": "t"}]) for form, row in THINKING.items()},
    "loss: false": (messages(ASK, {**ANSWER, "loss": False}, AGAIN, MORE), [ASK, ANSWER, AGAIN], [MORE]),
    "history": ({"instruction": "u2", "output": "a2", "history": [ASK, ANSWER]}, [ASK], [ANSWER, AGAIN, MORE]),
    "history beside a prompt": (
        {"prompt": "u2", "completion": "a2", "history": [["u", "a"]]},
        [ASK, ANSWER, {**AGAIN, "continued": True}],
        [MORE],
    ),
    "xLAM": (
        {"query": "u", "answers": '[{"name": "w", "arguments": {"city": "Paris"}}]', "tools": json.dumps([SCHEMA])},
        [ASK],
        CALLING,
    ),
    "Dolly": ({"instruction": "x", "context": "y", "response": "a"}, [{**ASK, "content": "x\ny"}], [ANSWER]),
    "OpenOrca": ({"system_prompt": "s", "question": "u", "response": "a"}, [SYSTEM, ASK], [ANSWER]),
    "a call with args": (said(content="", tool_calls=[{"name": "w", "args": {"city": "Paris"}}]), [ASK], CALLING),
}


@pytest.mark.parametrize("row", READ.values(), ids=READ)
def test_keys_that_are_read_become_turns(row):
    given, prompt, answered = row
    got = parsed(given)
    assert (got.example.prompt, got.example.answered) == (prompt, answered)
    assert got.unread == ()
    assert parsed(given, strict=True) == got


OF_A_TOOL = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "document", "source": {"data": "aQ=="}}]}
OTHER_PARTS = {
    "Gemini's": (messages({"role": "user", "parts": [{"text": "u"}]}, ANSWER), RowRefused, "messages[0].parts"),
    "Bedrock's": (said(content={"toolUse": {"name": "w", "input": {}}}), RowRefused, "toolUse"),
    "a file alone": (said(content={"type": "document", "source": {"data": "aQ=="}}), RowProblem, "source"),
    "a file of a tool": (messages(ASK, ANSWER, {"role": "user", "content": [OF_A_TOOL]}, MORE), RowProblem, "source"),
    "a label beside a text": (said(content=[{"text": "a", "label": "x"}]), RowProblem, "label"),
    "a mark beside a text": (said(content={"text": "a", "weight": 0}), RowRefused, "weight"),
    "Bedrock's document": (said(content=[{"document": {"bytes": "aQ=="}}]), RowProblem, "document"),
    "Gemini's code": (said(content=[{"executableCode": {"code": "1"}}]), RowRefused, "executableCode"),
}


@pytest.mark.parametrize(("row", "refusal", "name"), OTHER_PARTS.values(), ids=OTHER_PARTS)
def test_parts_that_are_not_read_are_refused_by_name(row, refusal, name):
    with pytest.raises(refusal, match=re.escape(f"{name}'")):
        parsed(row, strict=True)


TRACE = messages(
    ASK,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "x"},
            text("I look."),
            {"type": "tool_use", "id": "1", "name": "w", "input": {"city": "Paris"}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [text("21")]}, text("u2")]},
    MORE,
    tools=[{"name": "w", "description": "d", "input_schema": {"type": "object"}}],
)


def test_agents_traces_become_calls_results_and_thinking():
    example = parsed(TRACE).example
    assert example.prompt == [ASK]
    called, result, again, answer = example.answered
    thought = {"role": "assistant", "content": "I look.", "reasoning_content": "t"}
    assert called == {**thought, "tool_calls": [{"id": "1", **CALL}]}
    assert result == {"role": "tool", "content": "21", "tool_call_id": "1"}
    assert (again, answer) == (AGAIN, MORE)
    assert example.tools == [{"type": "function", "function": SCHEMA}]


@pytest.mark.parametrize("schema", [{"type": "function", **SCHEMA}, json.dumps(SCHEMA)])
def test_a_flat_schema_of_a_tool_has_no_second_type(schema):
    assert parsed(messages(ASK, ANSWER, tools=[schema])).example.tools == [{"type": "function", "function": SCHEMA}]


MARKED = "a mark of each turn: weight, train or loss"
PAIR = {"prompt": "u", "completion": "a"}
MARKS_OF_TURNS = {
    "mask": said(mask=True),
    "train_detail": said(train_detail=[{"begin_offset": 0}]),
    "training": said(training=False),
    "content[0].train": said(content=[text("a", train=False)]),
    "tool_calls[0].loss_mask": said(tool_calls=[{**CALL, "loss_mask": [0]}]),
}
REFUSED = {
    "a label beside raw text": ({"text": "u", "label": 1}, "label", "no label beside raw text; to learn it, use --c"),
    "a message of a tree": ({"text": "u", "parent_id": None, "role": "x"}, "role", "no role beside raw text"),
    "loss_mask": (messages(ASK, ANSWER, loss_mask=[0, 1]), "loss_mask", MARKED),
    "videos": (messages({**ASK, "content": "<video>"}, ANSWER, videos=["a.mp4"]), "videos", "only text and images"),
    **{f"a turn's {name}": (row, f"messages[1].{name}", MARKED) for name, row in MARKS_OF_TURNS.items()},
    "thinking that is not learnt": (
        said(content=[{"type": "thinking", "thinking": "t", "train": False}, text("a")]),
        "messages[1].content[0].train",
        MARKED,
    ),
    "a turn's images": (messages({**ASK, "images": ["a"]}, ANSWER), "messages[0].images", "images as parts"),
    "KTO's label": ({**PAIR, "label": "False"}, "label", "no judgment of the answer: preferences are learnt from"),
    "KTO's tag": (messages(ASK, ANSWER, kto_tag=True), "kto_tag", "no judgment of the answer"),
    **{
        f"a row's {name} {value!r}": (messages(ASK, ANSWER, **{name: value}), name, MARKED)
        for name, value in (
            *(("loss_scale", 0), ("weight", 0.5), ("weight", " 0 "), ("train", "False"), ("mask", True), ("loss", [1])),
        )
    },
    "a weight of raw text": ({"text": "u", "weight": 0}, "weight", MARKED),
    "tokens": ({**PAIR, "input_ids": [1, 2], "labels": [-100, 2]}, "labels", MARKED),
    "a switch of templates": (
        messages(ASK, ANSWER, enable_thinking=False),
        "enable_thinking",
        "this key within the obj",
    ),
    "a turn's channel": (said(channel="analysis"), "messages[1].channel", "an answer's thinking"),
    "lists of texts": ({"prompt": ["u"] * 2, "completion": ["a"] * 2}, "prompt", "one text, got 2 here and in comp"),
    "Python's repr": ({"prompt": "u", "completion": repr([ANSWER])}, "completion", "JSON of messages, got Python's "),
    "an unknown form": ({"words": "x"}, None, "columns messages or conversations"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_keys_of_another_meaning_are_refused_by_name(case):
    row, field, expected = case
    with pytest.raises(RowRefused) as caught:
        parsed(row)
    assert str(caught.value).startswith(f"{f'field {field!r}: ' if field else ''}expected {expected}")


def test_raw_text_is_read_beside_other_names_and_on_request():
    assert parsed({"text": "u", "message_id": "x", "file_name": "a.txt"}).unread == ("message_id", "file_name")
    for name, value in {"role": "x", "image": "0.png", "label": 1}.items():
        assert parsed({"text": "u", name: value}, (("text", "text"),)).unread == (name,)


FORMS = "messages or conversations, prompt and completion, instruction and output, or text"
BAD_TURNS = {
    "null": (said(content=None), "messages[].content", "text, got null or nothing"),
    "bytes": (said(content={"base64": "/w=="}), "messages[].content", "text, got bytes that are not UTF-8"),
    "an empty list": (said(content=[]), "messages[].content", "text, got an empty list"),
    "a video": (messages({**ASK, "content": [{"type": "video"}, text("u")]}), "messages[].content[]", "a part of type"),
    "two thinkings": (said(thinking="t", reasoning="s"), "messages[]", "one thinking, got different texts in "),
    "thinking of the user": (messages({**ASK, "thinking": "t"}, ANSWER), "messages[].thinking", "no thinking in a "),
    "a text behind a call": (said(content=[{"type": "tool_use", **USED}, text("a")]), "messages[].content", "thinking"),
    "thinking in two places": (said(content="<think>t</think>a", thinking="t"), "messages[].content", "no <think>, be"),
    **{
        f"a call {way} as text": (messages(ASK, *turns), "messages[]", "tool calls only in tool_calls, not also")
        for way, turns in {
            "beside it": [{**ANSWER, "content": "I look. <tool_call>w<arg_key>city</arg_key>", "tool_calls": [CALL]}],
            "with brackets": [{**ANSWER, "content": '[TOOL_CALLS][{"name": "w"', "function_call": CALL["function"]}],
            "before it": [
                {**ANSWER, "content": 'ok {"name": "w", "parameters": {"city": "Paris"}}'},
                {**ANSWER, "content": None, "tool_calls": [CALL]},
            ],
        }.items()
    },
    "marks that differ": (said(weight=1, loss=False), "messages[].loss", "the same as weight 1, got False"),
    "a role with a name in it": (messages({"role": "Bob", "content": "u"}, ANSWER), "messages[].role", "system, user"),
    "a user's system": ({**PAIR, "system_prompt": ASK}, "system_prompt", "a system prompt, got a turn of the user"),
    "a variable as text": (messages(ASK, chat_template_kwargs='{"a": "false"}'), "chat_template_kwargs.a", "true or f"),
    "a begun answer": ({"prompt": [ASK, ANSWER], "completion": "b"}, "prompt", "no assistant turn at its end"),
    "a null text": ({"text": None, "id": 3}, None, f"columns {FORMS}, got text (null), id; name other"),
    "not a list": ({"messages": 3}, "messages", "a list of messages, got int"),
    "a key twice": ({"messages": '[{"role": "x", "role": "y"}]'}, "messages", "a list of messages, or its JSON text ("),
    "not a message": (messages("x"), "messages[]", "a message, an object with role and content, got 'x'"),
    "an unknown role": (sharegpt(("narrator", "x")), "conversations[].from", "system, user, assistant or tool"),
    "half a weight": (said(weight=0.5), "messages[].weight", "0 or 1, false or true (a turn is learnt or not), got 0"),
    "a call without a name": (said(tool_calls=[{"arguments": "{}"}]), "messages[].tool_calls[]", "a call with a name"),
    "a call that is cut off": (
        said(tool_calls=[{"name": "f", "arguments": "{"}]),
        "messages[].tool_calls[].arguments",
        "JSON of a call",
    ),
    "a call that is no JSON": (sharegpt(("human", "u"), ("function_call", "f()")), "conversations[].value", "JSON of "),
    "half a history": ({"instruction": "u", "output": "a", "history": [["x"]]}, "history[]", "[question, answer]"),
    "a history that is no JSON": ({"instruction": "u", "output": "a", "history": "none"}, "history", "JSON of a list"),
    "JSON without a bottom": (messages(ASK, ANSWER, tools="[" * 99_999), "tools", "JSON of a list of tools (nest"),
    "calls in two words": (said(tool_calls=[CALL], function_call=USED), "messages[].function_call", "tool calls in"),
    "a tool without a name": (messages(ASK, ANSWER, tools=[{}]), "tools[]", "a tool's schema"),
    "a user's call": (messages({**ASK, "tool_calls": [CALL]}, ANSWER), "messages[].tool_calls", "no tool call"),
    "variables that are a list": (messages(ASK, ANSWER, chat_template_kwargs=[1]), "chat_template_kwargs", "an object"),
}


@pytest.mark.parametrize("case", BAD_TURNS.values(), ids=BAD_TURNS)
def test_a_row_with_a_bad_turn_is_left_out(case):
    row, field, expected = case
    at = f"field {field!r}: " if field else ""
    with pytest.raises(RowProblem) as caught:
        parsed(row, strict=True)
    assert without_numbers(str(caught.value)).startswith(f"{at}expected {expected}")
    with pytest.raises(RowLeftOut) as caught:
        parsed(row)
    same = re.match(r"(.*?)(, got ['\"\d-].*|[:,]? \(.*)?$", expected, re.DOTALL)[1]
    assert str(caught.value).startswith(f"malformed ({at}expected {same}")
    assert "Bob" not in str(caught.value)  # what differs from row to row would make a line for each


def test_a_call_of_another_tool_in_a_text_is_kept():
    for content in ('Like {"name": "v", "arguments": {}}?', "I call the tool w."):
        (answer,) = parsed(said(content=content, tool_calls=[CALL])).example.answered
        assert (answer["content"], answer["tool_calls"]) == (content, [CALL])


def test_bad_rows_are_counted_and_strict_rows_refuses_their_file(tmp_path):
    rows = [*[said()] * 5, said(content=None), messages(ASK, AGAIN, {**ANSWER, "content": None})]
    path = jsonl(tmp_path / "rows.jsonl", rows)
    examples = Chat(validation_file=path).dataset("validation")
    assert len(examples) == 5
    reason = "malformed (field 'messages[].content': expected text, got null or nothing)"
    assert f"2 rows left out: {reason} (lines 6, 7)" in examples.notes
    with pytest.raises(UserError, match=r"rows.jsonl:6: field 'messages\[1\].content': expected text, got null"):
        Chat(validation_file=path, strict_rows=True).dataset("validation")


UNREAD = {
    "a second form": (messages(ASK, ANSWER, prompt="x", completion="y"), ("prompt", "completion")),
    "Alpaca's text": ({"instruction": "u", "output": "a", "text": "u a"}, ("text",)),
    "a second answer": ({"instruction": "u", "output": "a", "response": "b"}, ("response",)),
    "a column without a name": ({"": "x", **said(), "prompt": "y"}, ('""', "prompt")),
    "marks that take nothing": (
        said() | {"weight": 1, "mask": "x", "labels": ["x"], "rejected": False},
        ("weight", "mask", "labels", "rejected"),
    ),
    "a null weight": (said() | {"weight": None, "train": "null", "loss": ""}, ("train",)),
    "OpenAI's": (
        messages(ASK, {**ANSWER, "refusal": "x", "annotations": [{}], "audio": None}, parallel_tool_calls=False),
        ("messages[].refusal", "messages[].annotations", "parallel_tool_calls"),
    ),
    "Anthropic's": (
        said(content=[{"type": "thinking", "thinking": "t", "signature": "x"}, text("a", citations=[1])], stop="x"),
        ("messages[].stop", "messages[].content[].citations", "messages[].content[].signature"),
    ),
    "nothing said": (messages(ASK, {**ANSWER, "name": None}, id=None, tags=[], videos=[], audios=None), ()),
}


@pytest.mark.parametrize("case", UNREAD.values(), ids=UNREAD)
def test_other_keys_with_values_are_named(case):
    row, unread = case
    assert parsed(row).unread == unread


def test_one_line_names_and_counts_all_keys_not_read(tmp_path):
    rows = [{**said(), "id": n, "source": "x", **({"persona": "p"} if n > 6 else {})} for n in range(10)]
    notes = Chat(validation_file=jsonl(tmp_path / "rows.jsonl", rows)).dataset("validation").notes
    assert notes[1:] == ["not read: id, source (10 rows), persona (3 rows)"]


def test_numbers_lists_and_objects_are_read_as_json():
    for value, as_text in ((5, "5"), (True, "true"), (["x", 0.5], '["x", 0.5]'), ({"a": "é"}, '{"a": "é"}')):
        for row in (said(content=value), {"instruction": "u", "output": value}, {"prompt": "u", "completion": value}):
            got = parsed(row)
            assert got.example.answer == {"role": "assistant", "content": as_text}
            assert AS_JSON in got.notes
    for got in ([], [{"name": "Bob", "role": "father"}]):
        assert json.loads(parsed({"prompt": "u", "completion": got}).example.answer["content"]) == got
    assert AS_JSON not in parsed(messages(ASK, {"role": "tool", "content": {"a": 1}}, ANSWER)).notes


@pytest.mark.parametrize("system", [["s", "t"], [SYSTEM, {**SYSTEM, "content": "t"}]])
def test_several_system_prompts_of_a_column_are_joined(system):
    got = parsed({"instruction": "u", "output": "a", "system": system})
    assert got.example.prompt[0] == {"role": "system", "content": "s\n\nt"}
    assert JOINED.format("system") in got.notes
    assert AS_JSON not in got.notes


@pytest.mark.parametrize("as_column", [False, True])
def test_tools_that_the_system_prompt_has_are_not_offered_twice(as_column):
    listed = f"Signatures are within <tools> </tools>.\n<tools>\n{json.dumps([SCHEMA])}\n</tools>"
    system = {"role": "system", "content": listed}
    row = {**messages(ASK, ANSWER), "system": listed} if as_column else messages(system, ASK, ANSWER)
    got = parsed(row | {"tools": json.dumps([SCHEMA])})
    assert (got.example.prompt[0], got.example.tools) == (system, None)
    assert any("the column tools is left out" in note for note in got.notes)
    got = parsed(row | {"tools": [SCHEMA, {**SCHEMA, "name": "description"}]})
    assert len(got.example.tools) == 2
    assert not any("left out" in note for note in got.notes)


def test_mark_on_a_turn_of_others_is_reported():
    assert OTHERS_MARKED in parsed(messages({**ASK, "train": True}, ANSWER)).notes
    assert OTHERS_MARKED not in parsed(messages({**ASK, "weight": 0, "loss": None}, ANSWER)).notes


def test_template_variables_of_a_row_reach_its_conversation():
    given = {"enable_thinking": False, "of_another_row": None}
    for value in (given, json.dumps(given)):
        example = parsed(messages(ASK, ANSWER, chat_template_kwargs=value)).example
        assert conversation(Chat(train_file="x"), [example], "train", 0).offered == {"enable_thinking": False}
    assert parsed(messages(ASK, ANSWER, chat_template_kwargs={})).example.variables is None
    given = {"thinking": True, "effort": "none", "enable_thinking": False, "depth": 0}
    assert parsed(messages(ASK, ANSWER, chat_template_kwargs=given)).example.variables == given


@pytest.mark.parametrize(
    ("row", "continued"),
    [
        ({"prompt": "u", "completion": "a"}, True),
        ({"prompt": "u", "completion": "a", "system": "s"}, False),
        ({"prompt": "u", "completion": "a", "tools": [SCHEMA]}, False),
        ({"prompt": [ASK], "completion": [ANSWER]}, False),
        ({"instruction": "u", "output": "a"}, False),
    ],
)
def test_only_a_plain_prompt_is_a_text_to_be_continued(row, continued):
    assert conversation(Chat(train_file="x"), [parsed(row).example], "train", 0).continued is continued


MARKS = ("<|im_start|>user\nu<|im_end|>", "<｜User｜>u", "### Human: u ### Assistant: a", "USER: u ASSISTANT: a")


@pytest.mark.parametrize("marks", MARKS)
def test_raw_text_that_a_template_wrote_is_reported(marks):
    (_, note) = parsed({"text": marks}).notes
    assert note.startswith("with the marks of a chat template in their text: ")
    assert "--control-tokens tokens" in note
    assert len(parsed({"text": "The <b>end</b> of a user."}).notes) == 1
