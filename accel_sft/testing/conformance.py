"""A test class that checks what the trainer expects of a task; each failure begins with a code."""

import contextlib
import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.api.task import Task, contract_faults
from accel_sft.chat.conversation import conversation, read_split
from accel_sft.chat.pictures import Picture

CODES = {
    "T101": ("the class breaks the contract of tasks", "correct the named methods and options"),
    "T102": ("problems() refuses the task's options", "construct the task with values that problems() accepts"),
    "T103": ("the task cannot be copied with the same options", "store each option's value unchanged"),
    "T201": ("dataset() fails, or returns no sequence of examples", "return a sequence with at least one example"),
    "T202": ("messages() or target() fails, or returns no conversation", "return chat messages, and a text as target"),
    "T203": ("a target is empty, so training leaves the row out", "add the answer, or remove the row"),
    "T204": ("a second call returns a different result", "draw random numbers in dataset() only, with a fixed seed"),
    "T205": ("two processes get different data", "seed random numbers, and sort sets: a set's order varies by process"),
    "T301": ("prompts of validation are also in training", "put rows with equal prompts into one split"),
    "T401": ("score() or aggregate() fails on a right answer", "return a dict of numbers that has the main metric"),
    "T402": ("a right answer does not score best", "let score() give the best score to the text of target()"),
    "T403": ("score() or aggregate() fails on text that a model may write", "treat unreadable text as a wrong answer"),
    "T404": ("a wrong answer scores as well as the right one", "give wrong answers a worse score"),
    "T405": ("scores cannot be written as JSON", "return numbers, texts, lists or dicts; NaN is not allowed"),
}
"""Code -> what is wrong, and how to fix it. A code never changes its meaning."""
SPLITS = ("train", "validation")
GARBAGE = ("", " \n", "\0", "{", "[[[", "null", "-1e999", "�" * 50, "no such answer " * 200, "<|im_end|>")
"""Answers such as untrained models write, and answers that break careless parsers."""


class TaskConformance:
    """Subclass this as `class TestMine(TaskConformance): task = MyTask()`; pytest then runs every test below.

    Attributes:
        task: the task, with the options that its data needs.
        examples: maximum number of examples to check in each split, evenly spread; all are checked for leaks.
        leaks_allowed: why prompts of validation may also be in training; if empty, they may not.
        best: the main metric that right answers must have. With None, a metric between 0 and 1 must be 1 (0 if lower
            is better), and any other metric must be better than that of garbage.
    """

    __test__ = False  # pytest must run subclasses only: see __init_subclass__
    task: ClassVar[Task]
    examples: ClassVar[int] = 100
    leaks_allowed: ClassVar[str] = ""
    best: ClassVar[float | None] = None

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        cls.__test__ = "task" in vars(cls) or getattr(cls, "task", None) is not None

    def test_the_class_keeps_the_contract(self) -> None:
        _hold("T101", contract_faults(type(self.task)))

    def test_the_options_are_valid_and_make_the_same_task_again(self) -> None:
        _hold("T102", self.task.problems())
        values = {setting.name: getattr(self.task, setting.name) for setting in settings(type(self.task))}
        again = type(self.task)(**json.loads(json.dumps(values)))
        changed = [name for name, value in values.items() if getattr(again, name) != value]
        _hold("T103", [f"in the copy, {name} is {getattr(again, name)!r}, not {values[name]!r}" for name in changed])

    def test_every_example_is_a_conversation(self) -> None:
        for split in SPLITS:
            examples = self._dataset(split)
            for index in self._indices(examples):
                chat = self._conversation(examples, split, index)
                if not chat.calls and not chat.target.strip():
                    raise AssertionError(finding("T203", f"{split} example {index}"))

    def test_calls_are_repeatable(self) -> None:
        for split in SPLITS:
            first, again = (observed(self.task, split, self.examples) for _ in range(2))
            _hold("T204", _differences(split, first, again))

    def test_two_ranks_get_the_same_examples(self) -> None:
        """As in training, each rank is a separate process, with a different seed for Python's hashes."""
        path = pickle.dumps(sys.path)
        with _fault("T103", "pickling failed with "):
            task = pickle.dumps((self.task, self.examples))
        hashes = []
        for number in range(2):
            env = {**os.environ, "PYTHONHASHSEED": str(number + 1)}
            command = [sys.executable, "-c", "from accel_sft.testing.conformance import rank; rank()"]
            done = subprocess.run(command, input=path + task, env=env, capture_output=True, check=False)
            if done.returncode:
                last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                raise AssertionError(finding("T205", f"rank {number} fails: {''.join(last)}"))
            hashes.append(json.loads(done.stdout))
        for split in SPLITS:
            _hold("T205", _differences(split, hashes[0][split], hashes[1][split]))

    def test_no_prompt_of_validation_is_in_training(self) -> None:
        if self.leaks_allowed:
            return
        seen = {}
        for split in SPLITS:
            examples = self._dataset(split)
            chats = (self._conversation(examples, split, i) for i in range(len(examples)))
            prompts = (json.dumps([chat.turns, *map(repr, chat.images)]) for chat in chats)
            seen[split] = {prompt: index for index, prompt in enumerate(prompts)}
        both = [prompt for prompt in seen["validation"] if prompt in seen["train"]]
        pairs = [f"validation {seen['validation'][p]} equals train {seen['train'][p]}" for p in both[:3]]
        _hold("T301", [f"{len(both)} prompts ({', '.join(pairs)})"] if both else [])

    def test_the_right_answer_scores_best(self) -> None:
        examples, rows = self._answered()
        if not rows:
            return  # no generated text is scored
        right = self._metric("T401", [self._score("T401", examples[i], text) for i, text in rows])
        best = self.best if self.best is not None else (1.0 if self.task.higher_is_better else 0.0)
        if right != best and (self.best is not None or 0 <= right <= 1):
            alone = {i: self._metric("T401", [self._score("T401", examples[i], text)]) for i, text in rows}
            wrong = [i for i, value in alone.items() if value != best]
            detail = f"{self.task.main_metric} of targets is {right:.4g}, not {best:.4g}"
            raise AssertionError(finding("T402", f"{detail} (validation examples {wrong[:5]})"))

    def test_garbage_scores_safely_and_lower(self) -> None:
        examples, rows = self._answered()
        if not rows:
            return
        right = self._metric("T401", [self._score("T401", examples[i], text) for i, text in rows])
        for garbage in GARBAGE:
            got = self._metric("T403", [self._score("T403", examples[i], garbage) for i, _ in rows])
            if got >= right if self.task.higher_is_better else got <= right:
                detail = f"{got:.4g} for {garbage[:20]!r}, and {right:.4g} for right answers"
                raise AssertionError(finding("T404", f"{self.task.main_metric} is {detail}"))

    def _dataset(self, split: str) -> Sequence[Any]:
        with _fault("T201"):
            return read_split(self.task, split)

    def _indices(self, examples: Sequence[Any]) -> list[int]:
        step = max(1, math.ceil(len(examples) / self.examples))
        return list(range(0, len(examples), step))

    def _conversation(self, examples: Sequence[Any], split: str, index: int) -> Any:
        with _fault("T202"):
            return conversation(self.task, examples, split, index)

    def _answered(self) -> tuple[Sequence[Any], list[tuple[int, str]]]:
        """Return the validation examples, and (index, target) of each checked example without tool calls."""
        examples = self._dataset("validation")
        if self.task.main_metric in ("eval_loss", "perplexity"):
            return examples, []
        chats = {index: self._conversation(examples, "validation", index) for index in self._indices(examples)}
        return examples, [(index, chat.target) for index, chat in chats.items() if not chat.calls]

    def _score(self, code: str, example: Any, text: str) -> dict[str, Any]:
        with _fault(code, f"score(..., {text[:40]!r}) raised "):
            score = self.task.score(example, text)
        with _fault("T405", f"{score!r}: "):
            json.dumps(score, allow_nan=False)
        return score

    def _metric(self, code: str, scores: list[dict[str, Any]]) -> float:
        with _fault(code, "aggregate() raised "):
            value = float(self.task.aggregate(scores)[self.task.main_metric])
        if not math.isfinite(value):
            raise AssertionError(finding(code, f"aggregate() gave {self.task.main_metric} {value}"))
        return value


@contextlib.contextmanager
def _fault(code: str, doing: str = "") -> Iterator[None]:
    """Context manager that turns an error into a failed test with this code."""
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, UserError) else repr(error)
        raise AssertionError(finding(code, f"{doing}{what}")) from error


def finding(code: str, detail: str) -> str:
    """A finding as a failed test shows it: code, meaning, what was seen, and the fix."""
    meaning, fix = CODES[code]
    return f"{code} {meaning}: {detail}; {fix}"


def _differences(split: str, first: list[str], again: list[str]) -> list[str]:
    if len(first) != len(again):
        return [f"{split} first has {len(first)} examples, then {len(again)}"]
    different = [index for index, pair in enumerate(zip(first, again, strict=True)) if pair[0] != pair[1]]
    return [f"{split}: {len(different)} of {len(first)} checked examples differ"] if different else []


def _hold(code: str, faults: Sequence[str]) -> None:
    if faults:
        raise AssertionError(finding(code, " | ".join(faults)))


def observed(task: Task, split: str, most: int) -> list[str]:
    """Return a SHA-256 for each of at most `most` examples, evenly spread. Each hash covers messages, target and the
    split's size. The hashes must be equal at every call and on every rank."""
    examples = read_split(task, split)
    step = max(1, math.ceil(len(examples) / most))
    chosen = (examples[index] for index in range(0, len(examples), step))
    contents = ([len(examples), task.messages(example), task.target(example)] for example in chosen)
    return [hashlib.sha256(json.dumps(content, default=_identity).encode()).hexdigest() for content in contents]


def _identity(value: Any) -> str:
    """Return a value as text for the hash. For an image these are its pixels: its repr() differs each time."""
    return repr(Picture(value) if hasattr(value, "tobytes") and hasattr(value, "mode") else value)


def rank() -> None:
    """Act as one rank: read sys.path and a pickled task from standard input, and write the hashes as JSON."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)  # what the task prints goes to standard error, in order
        sys.stdout = sys.stderr
        sys.path[:] = pickle.load(sys.stdin.buffer)
        task, most = pickle.load(sys.stdin.buffer)
        json.dump({split: observed(task, split, most) for split in SPLITS}, answer)
