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
    "T101": ("the class breaks the contract of tasks", "give it the methods and options that are named here"),
    "T102": ("its options are refused by problems()", "construct it with values that problems() accepts"),
    "T103": ("its options do not make the same task again", "keep an option's value as it was given"),
    "T201": ("dataset() fails, or gives no sequence of examples", "return a sequence with at least one example"),
    "T202": ("messages() or target() fails, or gives no conversation", "return chat messages, and a text as target"),
    "T203": ("a target is empty, and training leaves the row out", "write the answer, or take the row out"),
    "T204": ("calling a method again gives another result", "draw nothing at random in a call; seed it in dataset()"),
    "T205": ("another process gets other data", "seed random numbers, and sort sets: their order differs by process"),
    "T301": ("prompts of validation are in training", "split by what the prompt says"),
    "T401": ("score() or aggregate() fails on a right answer", "give numbers by name, the main metric among them"),
    "T402": ("a right answer does not score best", "let score() take what target() gives as perfect"),
    "T403": ("score() or aggregate() fails on what a model may write", "score what cannot be read as wrong"),
    "T404": ("a wrong answer scores as well as the right one", "score wrong answers lower"),
    "T405": ("scores cannot be written as JSON", "give numbers, texts, lists and dicts of them; NaN is not allowed"),
}
"""Code -> what is wrong, and how to fix it. A code never changes its meaning."""
SPLITS = ("train", "validation")
GARBAGE = ("", " \n", "\0", "{", "[[[", "null", "-1e999", "�" * 50, "no such answer " * 200, "<|im_end|>")
"""Answers such as untrained models write, and answers that break careless parsers."""


class TaskConformance:
    """Subclass it as `class TestMine(TaskConformance): task = MyTask()`; pytest then runs every test below.

    Attributes:
        task: the task, with the options that its data needs.
        examples: at most this many examples of each split are checked, evenly spread; all are checked for leaks.
        leaks_allowed: a reason why prompts of validation may be in training; empty: they may not.
        best: what the main metric of right answers must be. None: 1 (or 0, if lower is better) if that metric lies
            between 0 and 1, else any number that is better than garbage's.
    """

    __test__ = False  # pytest is to run subclasses only; see __init_subclass__
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
        _hold("T103", [f"{name} was {values[name]!r}, and is {getattr(again, name)!r}" for name in changed])

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
        """Each rank is a process of its own, as in training, with its own seed of Python's hashes."""
        path = pickle.dumps(sys.path)
        with _fault("T103", "it cannot be pickled: "):
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
        rows = [f"validation {seen['validation'][p]} is train {seen['train'][p]}" for p in both[:3]]
        _hold("T301", [f"{len(both)} prompts ({', '.join(rows)})"] if both else [])

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
                detail = f"{garbage[:20]!r} gets {got:.4g}, the right answers {right:.4g}"
                raise AssertionError(finding("T404", f"{self.task.main_metric} of {detail}"))

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
        """Return the validation examples, and index and target of the checked ones whose answer is text, not a call."""
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
    """Inside, an error becomes a finding with this code."""
    try:
        yield
    except Exception as error:
        what = str(error) if isinstance(error, UserError) else repr(error)
        raise AssertionError(finding(code, f"{doing}{what}")) from error


def finding(code: str, detail: str) -> str:
    """A finding as a failed test shows it: code, meaning, what was seen, and the fix."""
    what, fix = CODES[code]
    return f"{code} {what}: {detail}; {fix}"


def _differences(split: str, first: list[str], again: list[str]) -> list[str]:
    if len(first) != len(again):
        return [f"{split} has {len(first)} examples, then {len(again)}"]
    different = [index for index, pair in enumerate(zip(first, again, strict=True)) if pair[0] != pair[1]]
    return [f"{split}: {len(different)} of {len(first)} looked at differ"] if different else []


def _hold(code: str, faults: Sequence[str]) -> None:
    if faults:
        raise AssertionError(finding(code, " | ".join(faults)))


def observed(task: Task, split: str, most: int) -> list[str]:
    """For at most `most` examples, evenly spread: a SHA-256 of messages, target and the split's size. These hashes must
    be equal at every call and on every rank."""
    examples = read_split(task, split)
    step = max(1, math.ceil(len(examples) / most))
    chosen = (examples[index] for index in range(0, len(examples), step))
    contents = ([len(examples), task.messages(example), task.target(example)] for example in chosen)
    return [hashlib.sha256(json.dumps(content, default=_identity).encode()).hexdigest() for content in contents]


def _identity(value: Any) -> str:
    """A value's text for the hash; for an image its pixels, because its own text differs from call to call."""
    return repr(Picture(value) if hasattr(value, "tobytes") and hasattr(value, "mode") else value)


def rank() -> None:
    """Act as one rank: read the path and a pickled task from standard input, and write what it observes as JSON."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)  # what the task prints goes to standard error, in order
        sys.stdout = sys.stderr
        sys.path[:] = pickle.load(sys.stdin.buffer)
        task, most = pickle.load(sys.stdin.buffer)
        json.dump({split: observed(task, split, most) for split in SPLITS}, answer)
