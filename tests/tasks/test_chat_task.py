"""The task chat: rows of every published form become the same turns, and what is done to them is told."""

from __future__ import annotations

import gzip
import hashlib
import io
import json

import pyarrow.parquet
import pytest
from chats import jsonl
from conftest import finished
from PIL import Image

from accel_sft import UserError
from accel_sft.chat.conversation import conversation
from accel_sft.evaluation.scoring import check_scoring
from accel_sft_chat import Chat
from accel_sft_chat.metrics import METRICS
from accel_sft_chat.task import parse_row
from accel_sft_chat.turns import Dialogue

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
TOOL = {"type": "function", "function": WEATHER}
SYSTEM, ASK, ANSWER = ({"role": role, "content": role[:1]} for role in ("system", "user", "assistant"))
AGAIN, MORE = {"role": "user", "content": "u2"}, {"role": "assistant", "content": "a2"}


pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def rows(tmp_path):
    """The task's rows of a file that has these, and its notes."""

    def read(*given, **options):
        task = Chat(validation_file=jsonl(tmp_path / "rows.jsonl", given), **options)
        examples = task.dataset("validation")
        turns = [(task.messages(example), task.target(example), task.tools(example)) for example in examples]
        return turns, examples.notes

    return read


def messages(*turns):
    return {"messages": list(turns)}


def sharegpt(*turns):
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


FORMS = {
    "messages (column messages: role, content)": [
        (messages(SYSTEM, ASK, ANSWER), [SYSTEM, ASK], "a"),
        (messages(ASK, ANSWER, AGAIN, MORE), [ASK], [ANSWER, AGAIN, MORE]),
        ({"messages": json.dumps([{**ASK, "tool_calls": None, "weight": None}, ANSWER]), "tools": None}, [ASK], "a"),
        (messages({"role": "user", "content": [{"type": "text", "text": "u"}]}, ANSWER), [ASK], "a"),
    ],
    "messages (column conversations: role, content)": [
        ({"conversations": [ASK, ANSWER], "system": "s"}, [SYSTEM, ASK], "a"),
    ],
    "messages (column conversation: input, output)": [
        ({"conversation": [{"input": "u", "output": "a"}]}, [ASK], "a"),
    ],
    "ShareGPT (column conversations: from, value)": [
        (sharegpt(("system", "s"), ("human", "u"), ("gpt", "a")), [SYSTEM, ASK], "a"),
    ],
    "prompt and completion (columns prompt, completion)": [
        ({"prompt": "u", "completion": "a"}, [{**ASK, "continued": True}], "a"),
        ({"prompt": [ASK, ANSWER, AGAIN], "completion": [MORE]}, [ASK, ANSWER, AGAIN], "a2"),
    ],
    "Alpaca (columns instruction, input, output)": [
        ({"instruction": "u", "input": "", "output": "a", "system": "", "history": []}, [ASK], "a"),
        (
            {"instruction": "x", "input": "y", "output": "a2", "system": "s", "history": [["u", "a"]]},
            [SYSTEM, ASK],
            [ANSWER, {"role": "user", "content": "x\ny"}, MORE],
        ),
    ],
}


def test_every_form_becomes_the_same_turns(rows):
    cases = [case for cases in FORMS.values() for case in cases]
    chats, notes = rows(*(row for row, *_ in cases))
    assert chats == [(prompt, answer, None) for _, prompt, answer in cases]
    assert len(notes) == len(FORMS)
    assert all(any(f"read as {form}" in note for note in notes) for form in FORMS)


CALLING = [ASK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "21"}, ANSWER]
PARIS = {"name": "weather", "arguments": {"city": "Paris"}}
WRITTEN = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
CALLS = {
    "OpenAI's": messages(ASK, {"role": "assistant", "content": None, "tool_calls": [WRITTEN]}, CALLING[2], ANSWER),
    "ShareGPT's": sharegpt(("human", "u"), ("function_call", json.dumps(PARIS)), ("observation", "21"), ("gpt", "a")),
    "functions": messages(
        ASK, {**ANSWER, "content": "", "function_call": PARIS}, {"role": "function", "content": "21"}, ANSWER
    ),
}
OFFERED = ({"tools": [TOOL]}, {"tools": json.dumps([WEATHER])}, {"functions": [WEATHER]})


def test_calls_of_tools_are_learnt_and_their_results_are_not(rows):
    chats, _ = rows(*(row | tools for row, tools in zip(CALLS.values(), OFFERED, strict=True)))
    assert chats == [(CALLING[:1], CALLING[1:], [TOOL])] * len(CALLS)


HELLO = {"role": "assistant", "content": "h"}
BLEMISHES = {
    "two user turns": ([AGAIN, ASK, ANSWER], [{"role": "user", "content": "u2\n\nu"}], "a", "two consecutive user t"),
    "two assistant turns": ([ASK, ANSWER, MORE], [ASK], "a\n\na2", "two consecutive assistant turns"),
    "a leading assistant turn": ([SYSTEM, HELLO, ASK, ANSWER], [SYSTEM, ASK], "a", "first turns are the assistant's"),
    "a user turn at the end": ([ASK, ANSWER, AGAIN], [ASK], "a", "last turns are no answer to learn"),
    "an empty system turn": ([{**SYSTEM, "content": ""}, ASK, ANSWER], [{**SYSTEM, "content": ""}, ASK], "a", ""),
    "an empty answer": (
        [ASK, {**ANSWER, "content": ""}, AGAIN, MORE],
        [ASK, {**ANSWER, "content": ""}, AGAIN],
        "a2",
        "with an empty assistant turn, which is not learnt",
    ),
    "marked": (
        [ASK, {**ANSWER, "weight": 0}, AGAIN, MORE],
        [ASK, ANSWER, AGAIN],
        "a2",
        "weight 0 (or train: false), which are not learnt",
    ),
    "a call behind a text": (
        [ASK, ANSWER, {"role": "assistant", "content": "", "tool_calls": [CALL]}, *CALLING[2:]],
        [ASK],
        [{**ANSWER, "tool_calls": [CALL]}, *CALLING[2:]],
        "",
    ),
    "a text behind a call": ([ASK, CALLING[1], ANSWER], [ASK], [CALLING[1], ANSWER], ""),
    "only a system turn": ([SYSTEM, ANSWER], [SYSTEM], "a", ""),
}


def test_blemishes_are_fixed_and_named(rows):
    chats, notes = rows(*(messages(*turns) for turns, *_ in BLEMISHES.values()))
    wanted = [note for *_, note in BLEMISHES.values() if note]
    for line, (name, (_, prompt, answer, note)) in enumerate(BLEMISHES.items(), 1):
        assert chats[line - 1][:2] == (prompt, answer), name
        assert not note or [n for n in notes if note in n and n.endswith(f"(line {line})")], name
    assert len(notes) == 1 + len(wanted)


@pytest.mark.parametrize(
    ("turns", "learn", "reason"),
    [
        ([ASK], "every", "no assistant turn to learn"),
        ([HELLO], "every", "there is nothing before the answer"),
        ([ASK, ANSWER], "marked", "no assistant turn is marked to be learnt"),
        ([ASK, {"role": "assistant", "content": "\n"}], "last", "no assistant turn to learn"),
    ],
)
def test_row_without_anything_to_learn_is_left_out(rows, turns, learn, reason):
    good = messages(ASK, {**ANSWER, "train": True})
    chats, notes = rows(good, good, messages(*turns), learn=learn)
    assert len(chats) == 2
    assert notes[-1] == f"1 row left out: {reason} (line 3)"


@pytest.mark.parametrize(
    ("learn", "prompt", "answered"),
    [
        ("every", [ASK], [ANSWER, AGAIN, {**MORE, "weight": 0}, ASK, HELLO]),
        ("last", [ASK, ANSWER, AGAIN, MORE, ASK], "h"),
        ("marked", [ASK], "a"),
    ],
)
def test_which_turns_are_learnt(rows, learn, prompt, answered):
    marked = [ASK, {**ANSWER, "weight": 1}, AGAIN, {**MORE, "train": False}, ASK, HELLO]
    (chat,), _ = rows(messages(*marked), learn=learn)
    assert chat[:2] == (prompt, answered)


def test_a_system_prompt_is_for_rows_without_one(rows):
    chats, notes = rows(
        messages(ASK, ANSWER), messages(SYSTEM, ASK, ANSWER), messages(SYSTEM, AGAIN, MORE), system_prompt="x"
    )
    assert [prompt[0]["content"] for prompt, *_ in chats] == ["x", "s", "s"]
    assert "1 row without a system prompt; they get --system-prompt (line 1)" in notes


@pytest.mark.parametrize("text", ['[{"name": "Bob", "role": "father"}]', "[]", "[{"])
def test_text_that_is_another_json_list_stays_text(rows, text):
    ((prompt, target, _),), _ = rows({"prompt": text, "completion": text})
    assert prompt == [{"role": "user", "content": text, "continued": True}]
    assert target == text


def test_cells_of_a_table_may_hold_lists_as_json(rows):
    turns = [ASK, ANSWER]
    (chat, pair), _ = rows(
        {"instruction": "u2", "output": "a2", "history": ' [ ["u", "a"]]'},
        {"prompt": f" {json.dumps([*turns, AGAIN])}", "completion": json.dumps([MORE])},
    )
    assert chat == ([ASK], [ANSWER, AGAIN, MORE], None)
    assert pair == ([*turns, AGAIN], "a2", None)
    ((prompt, *_), _), _ = rows(*({"instruction": "u", "output": "a", "history": empty} for empty in ("[]", " ")))
    assert prompt == [ASK]


def test_columns_by_other_names(rows):
    row = {"question": "u", "answer": "a", "persona": "s", "messages": "not meant"}
    (chat,), notes = rows(row, columns="prompt=question, completion=answer, system=persona")
    assert chat == ([SYSTEM, {**ASK, "continued": True}], "a", None)
    assert notes == ["1 row read as prompt and completion (columns question, answer)", "not read: messages (1 row)"]
    _, notes = rows(row, columns="prompt=question, completion=answer, system=who")
    assert notes[1] == "1 row without the column who, which --columns names"
    with pytest.raises(UserError, match="got question, answer, persona; name other columns"):
        rows({"question": "u", "answer": "a", "persona": "s"})
    with pytest.raises(UserError, match="expected a column answr, which --columns names, got question, answer"):
        rows({"question": "u", "answer": "a"}, columns="prompt=question,completion=answr")


def test_image_mark_without_an_image_is_reported(rows):
    question = {"prompt": "What is <image> in HTML?", "completion": "a"}
    _, notes = rows({**question, "images": []}, {**question, "images": None}, question)
    (note,) = notes[1:]  # of two in three: lines are named of fewer only
    assert note == "2 rows with <image> in a text and no image in the row; the mark is read as a word"


OPTIONS = [
    ({"train_file": None}, "--train-file: a file, a folder or a data set of the hub is needed"),
    ({"validation_file": "y", "held_out": 1}, "--held-out: --validation-file replaces it"),
    ({"held_out": -0.1}, "--held-out -0.1: expected a share from 0 to 1, or a"),
    ({"columns": "prompt"}, "--columns prompt: prompt has no column; write prompt=NAME"),
    ({"columns": "a=b"}, "--columns a=b: 'a' is not one of messages, prompt,"),
    ({"columns": "input=b,input=c"}, "--columns input=b,input=c: input is named twice"),
    ({"columns": "prompt=b,completion=b"}, "--columns prompt=b,completion=b: the column b is named for two things"),
    ({"regex": "x"}, "--regex and --metric regex need each other"),
    ({"metric": "regex", "regex": "("}, "--regex (: not a regular expression"),
    ({"metric": "bleu"}, "--metric bleu: not one of f1, exact, accuracy, chrf, json, regex, loss"),
]


@pytest.mark.parametrize(("options", "expected"), OPTIONS)
def test_options_that_do_not_fit_are_refused(options, expected):
    task = Chat(**{"train_file": "x", **options})
    (problem,) = task.problems()
    assert problem.startswith(expected)
    with pytest.raises(UserError):
        task.dataset("train")


UNLIKE = [("!", "?"), ("x", ""), ("-1", "1"), ("C", "C++"), ("C#", "C++"), ("A-", "A"), ("10", "10%"), ("1.5", "5.1")]
UNLIKE += [("01/02/2026", "02/01/2026"), (".5", "5"), ("3-4", "4-3"), ("दिन", "दान"), ("كِتَاب", "كُتَّاب")]
SIGNS = [("==", "!="), ("≥", "<"), ("👍", "👎")]
OPERATORS = [("*", "+", 2 / 3), ("//", "/", 2 / 3), ("*", "-", 0.8), ("+", "-", 0.8)]
SCORES = {
    "accuracy": [("a", " a\n", 1.0), ("a", "A", 0.0)],
    "f1": [
        ("a b", "b, A!", 1.0),
        ("a b c d", "a b", 2 / 3),
        ("你好吗", "你好", 0.8),
        ("", "", 1.0),
        ("是-5, 10%的 (C++), grade A-.", "是 \u22125 10 % 的 c++ Grade a-", 1.0),
        ("co-op 3-4 well-known -", "co op, 3-4: well - known", 1.0),
        ("5°C, 1.5 kg.", "5 °C (1.5 kg)", 1.0),
        ("caf\u00e9 -.5", "cafe\u0301 -.5", 1.0),
        *((right, wrong, 0) for right, wrong in UNLIKE),
        *((f"a {right} b", f"a {wrong} b", 2 / 3) for right, wrong in SIGNS),
        *(("5 * 3", "5 - 3", 2 / 3), ("5€", "5$", 0.5)),
        *((f"a {right} b", f"a {wrong} b", score) for right, wrong, score in OPERATORS),
        *(("SELECT *", "select", 2 / 3), ("count(*)", "count()", 2 / 3), ("!a", "a", 2 / 3), ("f(!a)", "f(a)", 0.8)),
        ("* Paris - France\n * **Oslo**, *why*!", "- Paris, France\n- Oslo (why?)", 1.0),
        ("why!Oslo ![why] **a** b", "why oslo why *a* b", 1.0),
    ],
    "exact": [("a", " a\n", 1.0), ("<think>b</think>a", "<think>c\nd</think>\n\na", 1.0), ("a", "A", 0.0)],
    "json": [
        ('{"a": 1, "b": []}', '```json\n{"b": [], "a": 1}\n```', 1.0),
        *(("[1]", "[1.5]", 0), ("[1]", "1]", 0), ("x", "x", 0)),
    ],
    "regex": [
        ("so #### 12", "12 ####  12 ", 1.0),
        *(("#### 1", "#### 1 #### 2", 0), ("#### 1", "1", 0), ("1", "1", 0)),
    ],
    "chrf": [("你好吗", "你好吗", 1.0), ("abc", "xyz", 0.0), ("abc", "", 0.0)],
}


@pytest.mark.parametrize("metric", SCORES)
def test_metrics(metric):
    if metric == "chrf":
        pytest.importorskip("sacrebleu")
    task = Chat(train_file="x", metric=metric, regex=r"####\s*(\S+)" if metric == "regex" else None)
    for expected, text, value in SCORES[metric]:
        example = Dialogue([ASK], [{"role": "assistant", "content": expected}], None)
        scores = task.score(example, text)
        assert scores[task.main_metric] == pytest.approx(value), (expected, text)
        assert task.main_metric in task.aggregate([scores])
    assert task.main_metric == METRICS[metric].key


def test_a_call_is_right_however_the_template_writes_it():
    task, example = Chat(train_file="x", metric="exact"), Dialogue([ASK], CALLING[1:2], [TOOL])
    for text in (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        '[TOOL_CALLS] {"name": "weather", "arguments": {"city": "Paris"}}',
        '{"type": "function", "function": {"name": "weather", "parameters": {"city": "Paris"}}}',
    ):
        assert task.score(example, text) == {"exact_match": 1.0}
        assert task.score(example, text.replace("Paris", "Lima")) == {"exact_match": 0.0}


def test_a_file_of_chats_trains_on_two_ranks(launched, tmp_path_factory):
    """With its blemishes; which turns are learnt, what was done and what is held out is told."""
    given = [sharegpt(("human", f"What is {n} + 1?"), ("gpt", f"It is {n + 1}.")) for n in range(100)]
    given[7] = sharegpt(("human", "Hello."), ("human", "What is 7 + 1?"), ("gpt", "It is 8."))
    given[67] = sharegpt(("human", "Hello."))
    path = tmp_path_factory.mktemp("chats") / "sharegpt.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, given)).encode()))
    run = launched(
        "chat", "chat", "--train-file", str(path), "--max-steps", "2", "--eval-limit", "4", "--max-new-tokens", "8",
        yaml="ddp",
    )  # fmt: skip
    for line in (
        "rows read as ShareGPT (column conversations: from, value)",
        "with two consecutive user turns, which are joined by a blank line (line 8)",
        "left out: no assistant turn to learn (line 68)",
        "rows are held out of",
    ):
        assert line in " ".join(run.output.split()), line
    assert run.result()["main_metric"] == "token_f1"
    assert run.lines("eval_loss")[-1]["eval_loss"] < run.lines("eval_loss")[0]["eval_loss"]


def test_training_by_loss_alone_generates_nothing(tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", ({"instruction": f"{n}?", "output": f"It is {n}."} for n in range(200)))
    command = ("chat", "--train-file", rows, "--metric", "loss", "--max-steps", "2", "--eval-every", "1")
    run = finished(*command, run_dir=tmp_path / "run")
    assert run.lines("eval_loss")[-1]["eval_loss"] < run.lines("eval_loss")[0]["eval_loss"]
    assert [set(line) for line in run.lines("eval_loss")] == [{"step", "eval_loss"}] * 3
    assert run.result()["best"]["eval_loss"] == min(line["eval_loss"] for line in run.lines("eval_loss"))
    assert "validation loss" in (run.run_dir / "report.md").read_text()


def test_check_names_rows_of_chat_files_by_line(tmp_path, called):
    lines = [json.dumps(messages({**ASK, "content": f"{n}?"}, {**ANSWER, "content": f"{n}"})) for n in range(40)]
    lines[5] = json.dumps(messages({"role": "user", "content": None}, ANSWER))
    lines[11] = json.dumps({"query": "u"})
    lines[9] = json.dumps(messages(ASK))
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    done = called("check", "chat", "--train-file", str(tmp_path / "chats.jsonl"), "--json")
    report = json.JSONDecoder().raw_decode(done.output)[0]
    reported = {finding["code"]: [row["where"] for row in finding["rows"]] for finding in report["findings"]}
    expected = {"D102": [12], "D104": [6, 10]}
    assert reported == {code: [f"{tmp_path}/chats.jsonl:{line}" for line in lines] for code, lines in expected.items()}


def test_rows_trained_on_and_evaluated_are_a_leak(called, tmp_path):
    rows = jsonl(tmp_path / "rows.jsonl", ({"prompt": f"u{n}", "completion": f"a {n}"} for n in range(30)))
    for mode, code in ((("--held-out", "0"), 0), (("--validation-file", rows), 1)):
        audit = called("check", "chat", "--train-file", rows, *mode)
        assert (audit.status, "D404" in audit.output) == (code, bool(code))
        assert ("are both trained on and evaluated" in audit.output) is not bool(code)


def part(path=None):
    return {"type": "image", **({"image": path} if path else {})}


def text(words):
    return {"type": "text", "text": words}


PICTURED = {
    "parts": messages({"role": "user", "content": [part("a.png"), text("what?")]}, ANSWER),
    "OpenAI's parts": messages(
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}, text("what?")]}, ANSWER
    ),
    "a column": messages({"role": "user", "content": [part(), text("what?")]}, ANSWER) | {"images": ["a.png"]},
    "marks and a column": {**sharegpt(("human", "<image>what?"), ("gpt", "a")), "images": ["a.png"]},
    "a column alone": {"prompt": "what?", "completion": "a", "images": [{"path": "a.png", "bytes": None}]},
    "one image": {"instruction": "<image>what?", "output": "a", "image": "a.png"},
}


@pytest.mark.parametrize("row", PICTURED.values(), ids=PICTURED)
def test_images_of_every_form_are_parts_of_the_messages(rows, tmp_path, row):
    (((user,), target, _),), notes = rows(row)
    assert user["role"] == "user"
    assert user["content"] == [part(str(tmp_path / "a.png")), text("what?")]
    assert target == "a"
    assert any("no <image> in their texts" in note for note in notes) == ("prompt" in row)
    (tmp_path / "other").mkdir()
    task = Chat(validation_file=f"{tmp_path}/rows.jsonl,{jsonl(tmp_path / 'other' / 'rows.jsonl', [row])}")
    _, beside = (task.messages(example)[0]["content"][0] for example in task.dataset("validation"))
    assert beside == part(str(tmp_path / "other" / "a.png")), "beside the file that names them"


def test_images_within_a_parquet_file_win_over_files_beside_it(tmp_path):
    pictures = []
    for colour in ("red", "blue"):
        Image.new("RGB", (2, 2), colour).save(file := io.BytesIO(), "png")
        pictures.append(file.getvalue())
    (tmp_path / "a.png").write_bytes(pictures[1])
    said = {"role": "assistant", "content": [text("a")]}
    within = {"bytes": pictures[0], "path": "a.png"}
    turns = [{"role": "user", "content": [part(), text("what?")]}, said]
    forms = {
        "bytes and path": {"messages": turns, "images": [within]},
        "bytes alone": {"prompt": "<image>what?", "completion": "a", "image": pictures[0]},
        "a part": {"messages": [{"role": "user", "content": [{"type": "image", "image": within}]}, said]},
        "no bytes": {"messages": turns, "images": [{"bytes": None, "path": "a.png"}]},
    }
    for form, row in forms.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "rows.parquet")
        task = Chat(validation_file=str(tmp_path / "rows.parquet"))
        (picture,) = conversation(task, task.dataset("validation"), "validation", 0).images
        assert picture.digest == hashlib.sha256(pictures[form == "no bytes"]).hexdigest(), form


def test_images_stay_with_their_turns_and_tell_rows_apart(rows, tmp_path):
    first, second = {"role": "user", "content": "<image> and <image>"}, {"role": "user", "content": "now <image>"}
    row = messages(first, {"role": "user", "content": "say"}, ANSWER, second, MORE, ASK) | {"images": ["1", "2", "3"]}
    plain = messages({"role": "user", "content": "what is <image>?"}, ANSWER)
    turns, _ = rows(row, plain)
    (prompt, target, _), (spoken, _, _) = turns
    place = [part(str(tmp_path / name)) for name in "123"]
    assert prompt == [{"role": "user", "content": [place[0], text(" and "), place[1], text("\n\nsay")]}]
    assert target[1]["content"] == [text("now "), place[2]]
    assert spoken == plain["messages"][:1]
    same = [parse_row((), "every", None, {"prompt": "what?", "completion": "a", "images": [name]}) for name in "12"]
    assert same[0].group != same[1].group


@pytest.mark.parametrize("empty", ["", [None], [{"bytes": None, "path": ""}]])
def test_places_of_images_without_any_are_passed_over(rows, tmp_path, empty):
    (plain, seen), _ = rows({"instruction": "u", "output": "a", "image": empty}, {**PICTURED["parts"], "image": empty})
    assert plain[0] == [ASK]
    assert seen[0][0]["content"] == [part(str(tmp_path / "a.png")), text("what?")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "<image>?", "completion": "a", "image": ""}, r"image\[0\]': expected an image's path or bytes"),
        ({"prompt": "<image><image>?", "completion": "a", "images": ["1"]}, "an image for each of 2 <image> .* got 1"),
        (messages({"role": "user", "content": [part(), text("?")]}, ANSWER), "an image for each of 1 <image> .* got 0"),
    ],
)
def test_images_that_do_not_fit_their_texts_are_refused(rows, row, message):
    with pytest.raises(UserError, match=message):
        rows(row, strict_rows=True)


def test_answers_of_one_word_are_best_scored_by_another_metric(tmp_path):
    labels, long = ["order status", "order return"] * 10, ["yes, it is"] * 20
    for answers, metric, hints in ((["yes"] * 20, "f1", 1), (labels, "f1", 1), (labels, "exact", 0), (long, "f1", 0)):
        rows = ({"prompt": "u", "completion": answer} for answer in answers)
        task = Chat(validation_file=jsonl(tmp_path / "rows.jsonl", rows), metric=metric)
        assert str(task.dataset("validation").notes).count("--metric exact") == hints


@pytest.mark.parametrize(("answers", "warned"), [(["\\boxed{1}"] * 3, True), (["1", "#### 2"], False)])
def test_a_metric_that_matches_no_own_answer_is_named(tmp_path, answers, warned):
    rows = ({"prompt": "u", "completion": answer} for answer in answers)
    task = Chat(validation_file=jsonl(tmp_path / "rows.jsonl", rows), metric="regex", regex=r"#### (\d+)")
    lines = check_scoring(task, task.dataset("validation"))
    assert [line.split(":")[0] for line in lines] == ["warning"] * warned


@pytest.mark.parametrize(
    ("rows", "options", "parts"),
    [
        (600, {}, ("30 of 600 rows are held out of", "±0.17 (95%); --held-out 100 makes it ±0.10")),
        (60, {"held_out": 20}, ("20 of 60 rows are held out of", "±0.20 (95%); see --validation")),
    ],
)
def test_few_rows_held_out_are_named_with_their_interval(tmp_path, rows, options, parts):
    file = jsonl(tmp_path / "rows.jsonl", ({"prompt": f"{n}?", "completion": f"a {n}"} for n in range(rows)))
    (note,) = [n for n in Chat(train_file=file, **options).dataset("validation").notes if "held out" in n]
    assert all(part in note for part in parts)


def test_single_prompt_needs_a_validation_file_or_none_held_out(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", ({"prompt": "u", "completion": f"a {n}"} for n in range(40)))
    task = Chat(train_file=file, held_out=0)
    assert len(task.dataset("train")) == 40
    assert task.dataset("validation").notes[0].startswith("2 rows are both trained on and evaluated")
    assert "2 rows" not in str(task.dataset("train").notes)
    with pytest.raises(UserError, match=r"all rows have one prompt, .* --validation-file, or --held-out 0"):
        Chat(train_file=file).dataset("train")


def test_single_good_row_is_refused_with_rows_left_out(tmp_path):
    rows = [{"prompt": "u", "completion": "a"}, *[{"prompt": "u", "completion": None}] * 9]
    with pytest.raises(UserError) as caught:
        Chat(train_file=jsonl(tmp_path / "rows.jsonl", rows)).dataset("train")
    problem, note = caught.value.problems
    assert "there is one row" in problem
    assert note == "9 rows left out: malformed (field 'completion': expected text, got null or nothing)"


def test_missing_values_that_are_written_as_words_are_noted(rows):
    word = {"instruction": "u", "output": "a"}
    _, notes = rows(
        {**word, "input": "nan"}, {**word, "input": ""}, {**word, "input": "x\n None "}, {**word, "output": "null"}
    )
    words = (("None", 3), ("nan", 1), ("null", 4))
    line = "1 row with a text that is '{}', which is learnt as a word (line {})"
    assert sorted(notes[1:]) == [line.format(*word) for word in words]
    _, notes = rows({**word, "output": r"\N"})
    assert r"with a text that is '\\N'" in notes[1]
    _, notes = rows({**word, "output": "It returns:\nNone"}, {**word, "input": "nano"})
    assert notes[1:] == []


NUMBERS = ("12.50", '{"a": [{"b": 1E5}, null, true, "\u00e9"]}', "[]")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_number_is_learnt_as_the_file_writes_it(number, tmp_path):
    (tmp_path / "numbers.jsonl").write_text(f'{{"prompt": "u", "completion": {number}}}\n' * 2, encoding="utf-8")
    task = Chat(validation_file=str(tmp_path / "numbers.jsonl"))
    assert task.target(task.dataset("validation")[0]) == number
    turns = json.dumps([{"role": role, "content": role} for role in ("user", "tool", "assistant")])
    turns = turns.replace('"content": "tool"', f'"content": {number}')
    (tmp_path / "results.jsonl").write_text(f'{{"messages": {turns}}}\n' * 2, encoding="utf-8")
    task = Chat(validation_file=str(tmp_path / "results.jsonl"))
    assert task.messages(task.dataset("validation")[0])[1]["content"] == number


def test_raw_text_has_no_prompt_and_is_scored_by_perplexity(tmp_path):
    texts = [*(f"Once {n}." for n in range(30)), " "]
    task = Chat(train_file=jsonl(tmp_path / "rows.jsonl", ({"text": text} for text in texts)))
    train, validation = task.dataset("train"), task.dataset("validation")
    assert (len(train), len(validation)) == (28, 2)
    assert any(note == "30 rows read as raw text (column text)" for note in train.notes)
    assert any("left out: the text is empty" in note for note in train.notes)
    assert [task.messages(row) for row in train] == [[]] * 28
    assert {task.target(row) for row in (*train, *validation)} == {f"Once {n}." for n in range(30)}
    assert (task.main_metric, task.higher_is_better) == ("perplexity", False)
    assert any("scored by its perplexity" in note for note in validation.notes)
    assert Chat(train_file=task.train_file, metric="loss").dataset("validation") == validation
    with pytest.raises(UserError, match=r"--metric exact: raw text has no answer to compare"):
        Chat(train_file=task.train_file, metric="exact").dataset("validation")
    assert Chat(train_file="-", metric="perplexity").main_metric == "perplexity"


def test_raw_text_column_by_another_name_is_read(tmp_path):
    file = jsonl(tmp_path / "rows.jsonl", [{"body": "Once.", "label": 1}, {"body": "Twice.", "label": 0}])
    rows = Chat(train_file=file, columns="text=body").dataset("train")
    assert {"2 rows read as raw text (column body)", "not read: label (2 rows)"} <= {*rows.notes}


@pytest.mark.parametrize("name", ["book.md", "book.txt.gz"])
def test_a_text_file_is_one_document(tmp_path, name):
    content = "\ufeffOnce upon a time.\r\n\n  And so on: é.\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    task = Chat(train_file=str(tmp_path / name), held_out=0)
    assert task.target(task.dataset("train")[0]) == content.decode("utf-8-sig")
    assert len(task.dataset("validation")) == 1
    with pytest.raises(UserError, match=r"there is one row, .* --validation-file, or --held-out 0"):
        Chat(train_file=str(tmp_path / name)).dataset("train")


def test_texts_of_a_folder_are_data_without_other_files(tmp_path):
    def rows(name=""):
        return Chat(train_file=str(tmp_path / name), held_out=0).dataset("train")

    for name, content in {"a.txt": "One.", "b.txt": "Two.", "README.md": "About it."}.items():
        (tmp_path / name).write_text(content)
    assert len(rows()) == 2
    pairs = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
    jsonl(tmp_path / "rows.jsonl", pairs)
    assert [row.prompt[0]["content"] for row in rows()] == ["a", "c"]
    jsonl(tmp_path / "rows.txt", pairs)
    assert len(rows("rows.txt")) == 2  # JSON under another name
