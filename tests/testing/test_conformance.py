"""The conformance kit: each code fires on a task with that fault, and the shipped tasks pass it."""

import dataclasses
import itertools
import re
import subprocess
import sys

import pytest
from chats import jsonl
from places import ROOT

from accel_sft import Task, option
from accel_sft.testing import TaskConformance
from accel_sft.testing.conformance import CODES
from accel_sft_chat import Chat
from accel_sft_math import Math
from accel_sft_ner import Ner

PAGE = ROOT / "docs/writing-a-task.md"


class TestMath(TaskConformance):
    task = Math()


class TestNer(TaskConformance):
    task = Ner()


@pytest.mark.parametrize("metric", ["f1", "loss"])
def test_the_shipped_chat_task_passes(tmp_path, metric):
    turns = ("user", "assistant", "user", "assistant")
    rows = [[{"role": role, "content": f"{role} {at} of {n}"} for at, role in enumerate(turns)] for n in range(20)]
    file = jsonl(tmp_path / "chats.jsonl", [{"messages": row} for row in rows])
    holds(Chat(train_file=file, metric=metric), "test_")


@dataclasses.dataclass(kw_only=True)
class Parity(Task):
    """Say whether a number is even."""

    main_metric = "accuracy"
    size: int = option(12, min=8, help="Numbers.")

    def dataset(self, split):
        return range(4, self.size) if split == "train" else range(4)

    def messages(self, example):
        return [{"role": "user", "content": f"{example}?"}]

    def target(self, example):
        return ("even", "odd")[example % 2]

    def score(self, example, text):
        return {"accuracy": float(text == ("even", "odd")[example % 2])}


def task_with(**methods):
    """Parity with other methods; a class of this module, so that other processes find it."""
    made = dataclasses.dataclass(kw_only=True)(type("Parity", (Parity,), methods))
    return made()


class BySeedOfHashes(Parity):
    """Its sets have another order in each process."""

    def dataset(self, split):
        return [int(word) for word in {str(n) for n in super().dataset(split)}]


CALLS = itertools.count()
FAULTS = {
    "T101": ("test_the_class_keeps_the_contract", {"main_metric": ""}),
    "T102": ("test_the_options_are_valid", {"problems": lambda self: ["--size: wrong"]}),
    "T103": ("test_the_options_are_valid", {"__post_init__": lambda self: setattr(self, "size", self.size + 1)}),
    "T201": ("test_every_example", {"dataset": lambda self, split: []}),
    "T202": ("test_every_example", {"messages": lambda self, example: "5?"}),
    "T203": ("test_every_example", {"target": lambda self, example: " "}),
    "T204": ("test_calls_are_repeatable", {"target": lambda self, example: str(next(CALLS))}),
    "T301": ("test_no_prompt", {"dataset": lambda self, split: range(4)}),
    "T401": ("test_the_right_answer", {"aggregate": lambda self, scores: {}}),
    "T402": ("test_the_right_answer", {"score": lambda self, example, text: {"accuracy": 0.5}}),
    "T403": (
        "test_garbage",
        {"score": lambda self, example, text: {"accuracy": (text == self.target(example)) / (text != "{")}},
    ),
    "T404": ("test_garbage", {"score": lambda self, example, text: {"accuracy": 1.0}}),
    "T405": ("test_garbage", {"score": lambda self, example, text: {"accuracy": 1.0, "of": {text}}}),
}


def holds(task, test):
    kit = type("TestIt", (TaskConformance,), {"task": task})()
    for name in dir(kit):
        if name.startswith(test):
            getattr(kit, name)()


@pytest.mark.parametrize("code", FAULTS)
def test_each_fault_is_found_by_its_code(code):
    test, methods = FAULTS[code]
    with pytest.raises(AssertionError, match=f"^{code} .*; "):
        holds(task_with(**methods), test)


def test_data_that_differ_between_ranks_are_found():
    with pytest.raises(AssertionError, match=r"^T205 "):
        holds(BySeedOfHashes(), "test_two_ranks")


class Loud(Parity):
    """It prints, by itself and by a program that it starts."""

    def dataset(self, split):
        print("reading")
        subprocess.run(["echo", split], check=True)
        return super().dataset(split)


def test_a_task_may_print():
    holds(Loud(), "test_two_ranks_get_the_same_examples")


def test_the_page_lists_every_code_and_a_test_fires_each():
    assert CODES.keys() == FAULTS.keys() | {"T205"}
    assert re.findall(r"^\| (T\d+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE) == [*CODES]


def test_kit_needs_no_pytest_and_collects_no_own_test():
    script = "import sys; import accel_sft.testing as t; print('pytest' in sys.modules, t.TaskConformance.__test__)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False False\n"
