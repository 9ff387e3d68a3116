"""`accel-sft export-data`: chat files whose rows are what the task trains on."""

import json
import re

import pytest
from places import ROOT

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import conversation, read_split
from accel_sft.commands import export_data
from accel_sft.models.tiny import build_tiny
from accel_sft_chat import Chat
from accel_sft_math import Math

CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TURNS = [
    {"role": "system", "content": "Be brief.\u2028"},
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": "one"},
    {"role": "user", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "call00001"},
    {"role": "assistant", "content": "three"},
]


def chats(folder, learn, unlearnt=()):
    """Chats of several answers, with calls of tools, some of whose answers are not learnt."""
    turns = [*TURNS]
    for place in unlearnt:
        turns[place] = {**turns[place], "weight": 0}
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"messages": turns, "tools": TOOLS}) + "\n")
    files = {f"{split}_file": str(folder / f"{split}.jsonl") for split in ("train", "validation")}
    return Chat(**files, learn=learn)


def pairs(folder, row=None):
    """A row with two answers: by default a chat, whose chosen answer has a call."""
    row = row or {"prompt": TURNS[:4], "chosen": TURNS[4:5], "rejected": [TURNS[2]], "tools": TOOLS}
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    return Chat(**{f"{split}_file": str(folder / f"{split}.jsonl") for split in ("train", "validation")})


@pytest.mark.parametrize("name", ["math", "chat, the last answer", "chat, some answers", "pairs", "pairs of texts"])
def test_chat_trains_on_exported_files_as_the_task_did(name, tmp_path, capsys):
    task = {
        "math": lambda: Math(train_examples=50, validation_examples=5),
        "chat, the last answer": lambda: chats(tmp_path, "last"),
        "chat, some answers": lambda: chats(tmp_path, "every", [2]),
        "pairs": lambda: pairs(tmp_path),
        "pairs of texts": lambda: pairs(tmp_path, {"prompt": "Once", "chosen": " upon", "rejected": " more"}),
    }[name]()
    export_data.run(task, str(tmp_path / "rows"))
    files = {f"{split}_file": str(tmp_path / "rows" / f"{split}.jsonl") for split in export_data.SPLITS}
    again, printed = Chat(**files), capsys.readouterr().out
    for split in export_data.SPLITS:
        ours, theirs = read_split(task, split), read_split(again, split)
        assert len(ours) == len(theirs)
        assert f"{split}.jsonl: {len(ours):,} rows" in printed
        for index in range(len(ours)):
            expected, actual = conversation(task, ours, split, index), conversation(again, theirs, split, index)
            turns = [{key: value for key, value in turn.items() if key != "weight"} for turn in actual.turns]
            assert (turns, actual.answer) == (expected.turns, expected.answer)
            assert (actual.learnt, actual.tools) == (expected.learnt, expected.tools)
            assert (actual.rejected, actual.continued) == (expected.rejected, expected.continued)


def test_template_variables_and_texts_to_continue_are_exported(tmp_path):
    turns = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "one"}]
    rows = {"messages": turns, "chat_template_kwargs": {"enable_thinking": False}}, {"prompt": "1", "completion": "one"}
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = Chat(validation_file=str(tmp_path / "rows.jsonl"))
    examples = read_split(task, "validation")
    chats = [conversation(task, examples, "validation", index) for index in range(2)]
    assert tuple(map(export_data.chat_row, chats)) == rows


def test_forms_of_other_trainers_are_as_documented(tmp_path, monkeypatch):
    page = ROOT / "docs" / "multinode.md"
    (script,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.S)
    monkeypatch.chdir(tmp_path)
    export_data.run(Math(train_examples=20, validation_examples=3), "rows")
    build_tiny(tmp_path / "merged", ["12=", "5 + 7"], 0)
    exec(script, {})
    texts, turns = ((tmp_path / name).read_text().splitlines() for name in ("text.jsonl", "colossal.jsonl"))
    rows = [json.loads(line)["messages"] for line in (tmp_path / "rows" / "train.jsonl").read_text().splitlines()]
    assert len(texts) == len(turns) == len(rows) == 20
    for text, named, row in zip(texts, turns, rows, strict=True):
        assert all(turn["content"] in json.loads(text)["text"] for turn in row)
        said = [{"from": turn["role"], "content": turn["content"]} for turn in row[1:]]
        assert json.loads(named) == {"messages": said}


def test_the_command_writes_a_folder_that_is_new(called, tmp_path):
    arguments = ("export-data", "math", str(tmp_path / "rows"), "--train-examples", "20", "--validation-examples", "3")
    done = called(*arguments)
    assert done.status == 0, done.output
    note, *lines = done.output.splitlines()
    assert note == "any two integers with the right sum are a right answer; the expected answer is one example"
    assert lines == [f"{tmp_path}/rows/train.jsonl: 20 rows", f"{tmp_path}/rows/validation.jsonl: 3 rows"]
    again = called(*arguments)
    assert again.status == 1
    assert re.fullmatch("Error: .*rows: not empty; name another folder.*\n", again.output)


def test_a_row_that_training_would_refuse_leaves_no_files_behind(tmp_path, monkeypatch):
    task = Math(train_examples=20, validation_examples=3)
    monkeypatch.setattr(Math, "target", lambda self, example: None)
    with pytest.raises(UserError, match="train example 0: target"):
        export_data.run(task, str(tmp_path / "rows"))
    assert [*tmp_path.iterdir()] == []
