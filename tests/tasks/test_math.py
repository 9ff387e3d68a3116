"""The math task: what it asks, what it accepts as right, and that no number asked in validation was trained on."""

import json
import subprocess
import sys

import pytest
from chats import jsonl

from accel_sft import UserError
from accel_sft_math import Example, Math

PREFIX = Math().answer_prefix
FIVE = Example("5=", 5, f"{PREFIX}1 + 4")


def row(number, output=None, **extra):
    return {"instruction": f"{number}=", "input": "", "output": output or f"{PREFIX}1 + {number - 1}", **extra}


def complaint(**options):
    with pytest.raises(UserError) as caught:
        Math(**options).dataset("train")
    return caught.value.problems


@pytest.mark.parametrize("addends", ["no-carry", "uniform"])
@pytest.mark.parametrize("held_out", ["random", "largest"])
def test_built_in_answers_are_right_and_validation_is_apart(addends, held_out):
    task = Math(max_number=300, validation_examples=60, train_examples=900, addends=addends, held_out=held_out)
    train, validation = task.dataset("train"), task.dataset("validation")
    assert (len(train), len(validation)) == (900, 60)
    numbers = {example.number for example in validation}
    assert len(numbers) == 60
    assert not numbers & {example.number for example in train}
    assert len(numbers | {example.number for example in train}) == 300
    scores = [task.score(example, task.target(example)) for example in [*train, *validation]]
    result = task.aggregate(scores)
    assert result["accuracy"] == result["format_rate"] == 1.0
    assert result["nonzero_addends"] > 0.95
    if held_out == "largest":
        assert min(numbers) == 241
    if addends == "no-carry":
        for example in train:
            pair = (number.rjust(4, "0") for number in example.answer.removeprefix(PREFIX).split(" + "))
            assert all(int(first) + int(second) < 10 for first, second in zip(*pair, strict=True))


def test_examples_are_a_function_of_the_options():
    first, again, other = Math(), Math(), Math(data_seed=1)
    assert first.dataset("train") == again.dataset("train")
    assert first.dataset("validation") != other.dataset("validation")
    assert first.dataset("validation") == Math(train_examples=10).dataset("validation")
    code = "import sys; from accel_sft_math import Math; task = Math(train_examples=300)\n"
    code += "print(*map(task.dataset, ('train', 'validation')), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code]
    printed = [subprocess.check_output(command, env={"PYTHONHASHSEED": seed, "PYTHONUTF8": "1"}) for seed in "12"]
    assert printed[0] == printed[1]
    assert printed[0].endswith(b" False\n"), "it needs no torch"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f" {PREFIX} 2+3\n", (1.0, 1.0)),
        (f"{PREFIX}-2 + 7", (1.0, 1.0)),
        (f"{PREFIX}2 + 2", (0.0, 1.0)),
        (f"{PREFIX}1 + 4 + 0", (0.0, 0.0)),
        (f"{PREFIX}٣ + ٢", (0.0, 0.0)),
        (f"{PREFIX}{'9' * 600} + 1", (0.0, 1.0)),
        (f"{PREFIX}{'9' * 100_000} + 1", (0.0, 0.0)),
    ],
)
def test_score(text, expected):
    result = Math().score(FIVE, text)
    assert (result["accuracy"], result["format_rate"]) == expected


def test_scores_are_json_and_degenerate_answers_show():
    task = Math()
    scores = [task.score(Example("", n, ""), f"{PREFIX}0 + {n}") for n in range(1, 11)]
    scores.append(task.score(FIVE, "no"))
    result = task.aggregate(json.loads(json.dumps(scores)))
    assert result["accuracy"] == pytest.approx(10 / 11)
    assert result["nonzero_addends"] == 0.0
    assert result["distinct_first_addends"] == pytest.approx(0.1)
    assert task.aggregate([task.score(FIVE, "no")]) == {"accuracy": 0.0, "format_rate": 0.0}
    assert task.aggregate([]) == {}


def test_files_of_both_forms_with_keys_of_their_own(tmp_path):
    validation = [row(9), row(10) | {"instruction": "", "input": "10="}]
    (tmp_path / "a.json").write_text(json.dumps([row(n, source="mine") for n in range(2, 9)]), encoding="utf-8")
    files = {"train_file": str(tmp_path / "a.json")}
    task = Math(**files, validation_file=jsonl(tmp_path / "b.jsonl", validation))
    assert [example.number for example in task.dataset("train")] == list(range(2, 9))
    assert [example.number for example in task.dataset("validation")] == [9, 10]
    assert task.messages(task.dataset("validation")[1])[1]["content"] == "10="


def test_a_number_in_both_files_is_refused_by_name(tmp_path):
    train = jsonl(tmp_path / "train.json", [row(n) for n in (2, 3, 4, 3)])
    validation = jsonl(tmp_path / "validation.json", [row(n) for n in (3, 4, 9)])
    (line,) = complaint(train_file=train, validation_file=validation)
    assert all(words in line for words in ("2 numbers", "(3, 4)", train, validation))


def test_built_in_training_leaves_out_the_validation_files_numbers(tmp_path):
    task = Math(validation_file=jsonl(tmp_path / "v.json", [row(5), row(7)]), max_number=20, train_examples=18)
    assert {example.number for example in task.dataset("train")} == set(range(1, 21)) - {5, 7}
    everything = jsonl(tmp_path / "all.json", [row(n) for n in range(1, 11)])
    (line,) = complaint(validation_file=everything, max_number=10)
    assert "--validation-file" in line


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"instruction": "5="}, ["'output'", "nothing"]),
        ({"instruction": 5, "output": ""}, ["'instruction'", "int"]),
        ({**row(5), "instruction": "five="}, ["'instruction'", "'5='"]),
        (row(5, "1 + 4"), ["'output'", "--answer-prefix"]),
        (row(5, f"{PREFIX}1 + 5"), ["'output'", "sum to 5", "'1 + 5'"]),
    ],
)
def test_malformed_rows_are_named(tmp_path, bad, words):
    path = jsonl(tmp_path / "train.jsonl", [row(3), bad, row(4), bad])
    validation = jsonl(tmp_path / "validation.json", [row(9)])
    (line,) = complaint(train_file=path, validation_file=validation)
    assert line.startswith(f"{path}:2: ")
    assert line.endswith("; line 4 has the same problem")
    assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_number": 2}, ["--max-number", "at least 3"]),
        ({"validation_examples": 50, "max_number": 50}, ["--validation-examples", "--max-number"]),
        ({"answer_prefix": "Answer 1"}, ["--answer-prefix"]),
        ({"train_file": "a.json"}, ["--validation-file"]),
        ({"train_file": "a.json", "validation_file": "b.json", "max_number": 50}, ["--max-number", "--train-file"]),
    ],
)
def test_options_that_cannot_be_used_are_one_clear_line(options, words):
    (line,) = complaint(**options)
    assert all(word in line for word in words)
