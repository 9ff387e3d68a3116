"""The task `math`: given a number and "=", answer with a fixed prefix and any two integers that sum to the number."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import random
import re
from collections.abc import Sequence
from typing import Any, ClassVar

from accel_sft import RowProblem, Task, UserError, option, read_rows

SYSTEM_PROMPT = "You are a helpful assistant that solves the maths below."
_NAMED_NUMBERS = 10
"""Maximum number of numbers that an error names."""
_KIND_SHARE, _ONE_SHARE = 0.12, 0.36
"""A rare kind is repeated up to this share of all numbers: most kinds, and numbers that begin with 1."""
_MOST_REPEATS = 12
"""Maximum number of repetitions of a rare kind."""

# int() refuses numbers with more digits than a limit that may be set as low as 640; no honest answer is nearly as long.
_INTEGER = r"[+-]?[0-9]{1,600}"
_ANY_SUM = "any two integers with the right sum are a right answer; the expected answer is one example"
_QUESTION = re.compile(rf"\s*({_INTEGER})\s*=\s*")
_SUM = re.compile(rf"\s*({_INTEGER})\s*\+\s*({_INTEGER})\s*")


@dataclasses.dataclass(frozen=True)
class Example:
    """One example: the user's message, the number that it asks about, and one right answer with its prefix."""

    question: str
    number: int
    answer: str


class _BuiltIn(list[Example]):
    """Rows with a fingerprint, by which the token cache recognizes the rows without reading their messages."""

    notes: Sequence[str] = ()

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclasses.dataclass(kw_only=True)
class Math(Task):
    """Split a number into two addends: "5=" is answered with the prefix and "1 + 4"."""

    main_metric: ClassVar[str] = "accuracy"
    tiny_steps: ClassVar[int] = 700

    train_file: str | None = option(
        None, rows=True, help="Training rows: instruction, input, output; JSON array or JSON Lines."
    )
    validation_file: str | None = option(
        None, rows=True, help="Validation rows. None of their numbers may be in the training rows."
    )
    answer_prefix: str = option("Answer: ", help="Fixed text before every answer.")
    max_number: int = option(9999, min=3, max=1_000_000, help="Largest number in a question.")
    train_examples: int = option(30_000, min=1, max=10_000_000, help="Built-in training rows; numbers repeat.")
    validation_examples: int = option(200, min=1, help="Numbers held out, one validation row each.")
    held_out: str = option("random", choices=("random", "largest"), help="Which numbers are held out.")
    addends: str = option(
        "no-carry",
        choices=("no-carry", "uniform"),
        help="no-carry: no digit of the sum carries; uniform: any first addend.",
    )
    data_seed: int = option(0, min=0, help="Seed of the held-out numbers and the addends.")

    def problems(self) -> list[str]:
        found = super().problems()
        if found:
            return found
        if re.search(r"[0-9+-]\s*$", self.answer_prefix):
            found.append(f"--answer-prefix {self.answer_prefix!r}: ends like a number; end it differently")
        if self.train_file:
            if not self.validation_file:
                found.append(
                    f"--train-file {self.train_file}: give --validation-file too, with rows about other numbers, "
                    "or the score would not show what was learnt"
                )
            for field in dataclasses.fields(self):
                if field.name in _BUILT_IN_ONLY and getattr(self, field.name) != field.default:
                    flag = "--" + field.name.replace("_", "-")
                    found.append(f"{flag}: shapes the built-in rows, which --train-file replaces; leave it out")
        elif not self.validation_file and self.validation_examples >= self.max_number:
            found.append(
                f"--validation-examples {self.validation_examples}: holds out every number up to --max-number "
                f"{self.max_number}; leave some to train on"
            )
        return found

    def dataset(self, split: str) -> Sequence[Example]:
        """The rows of the files, or built-in ones. No number is in both splits.

        Raises:
            UserError: options or rows cannot be used, or a number is in both files.
        """
        if split not in ("train", "validation"):
            raise ValueError(f"split {split!r}: train or validation")
        found = self.problems()
        if found:
            raise UserError(*found)
        return self._train if split == "train" else self._validation

    def messages(self, example: Example) -> list[dict[str, str]]:
        return [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": example.question}]

    def target(self, example: Example) -> str:
        return example.answer

    def score(self, example: Example, text: str) -> dict[str, Any]:
        """Score a generated answer.

        `format_rate`: whether the answer is the prefix and two integers joined by +; `accuracy`: whether these integers
        also sum to the number. `first_addend` and `nonzero_addends` (whether both differ from 0) are None unless the
        answer is right.
        """
        addends = self._addends_of(text)
        right = addends is not None and sum(addends) == example.number
        return {
            "accuracy": float(right),
            "format_rate": float(addends is not None),
            "first_addend": str(addends[0]) if right else None,
            "nonzero_addends": float(all(addends)) if right else None,
        }

    def aggregate(self, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
        """Means of accuracy and format rate, and two figures on the right answers, if there are any.

        These are the share with two nonzero addends, and the number of different first addends per answer (near 0 if
        all begin alike).
        """
        if not scores:
            return {}
        right = [score for score in scores if score["accuracy"]]
        rates = {
            "accuracy": len(right) / len(scores),
            "format_rate": sum(score["format_rate"] for score in scores) / len(scores),
        }
        if not right:
            return rates
        return {
            **rates,
            "nonzero_addends": sum(score["nonzero_addends"] for score in right) / len(right),
            "distinct_first_addends": len({score["first_addend"] for score in right}) / len(right),
        }

    def _addends_of(self, text: str) -> tuple[int, int] | None:
        text, prefix = text.strip(), self.answer_prefix.strip()
        match = _SUM.fullmatch(text, len(prefix)) if text.startswith(prefix) else None
        return (int(match[1]), int(match[2])) if match else None

    @functools.cached_property
    def _validation(self) -> Sequence[Example]:
        if self.validation_file:
            rows = read_rows(self.validation_file, self._parse, split="validation")
            rows.notes.append(_ANY_SUM)
            return rows
        if self.held_out == "largest":
            numbers = range(self.max_number - self.validation_examples + 1, self.max_number + 1)
        else:
            numbers = sorted(_random(self, "numbers").sample(range(1, self.max_number + 1), self.validation_examples))
        draw = _random(self, "validation")
        held_out = _BuiltIn(self._example(number, draw) for number in numbers)
        held_out.notes = [_ANY_SUM]
        return held_out

    @functools.cached_property
    def _train(self) -> Sequence[Example]:
        held_out = {example.number for example in self._validation}
        if self.train_file:
            return self._read_unseen(frozenset(held_out))
        numbers = [number for number in range(1, self.max_number + 1) if number not in held_out]
        if not numbers:
            raise UserError(
                f"--validation-file {self.validation_file}: it has all numbers up to {self.max_number}; remove some"
            )
        draw = _random(self, "train")
        rows = _BuiltIn()
        while len(rows) < self.train_examples:
            draw.shuffle(numbers)
            rows += [self._example(number, draw) for number in numbers[: self.train_examples - len(rows)]]
            numbers = _with_rare_ones_often(numbers) if len(rows) == len(numbers) else numbers  # after each number once
        return rows

    def _read_unseen(self, held_out: frozenset[int]) -> Sequence[Example]:
        """The training rows, without any held-out number. Parsing checks this, so each file is checked only once."""
        try:
            return read_rows(self.train_file, functools.partial(self._parse_unseen, held_out))
        except UserError:
            rows = read_rows(self.train_file, self._parse)  # if the rows themselves are wrong, this raises first
            self._refuse_leak({row.number for row in rows} & held_out)
            raise

    def _refuse_leak(self, numbers: set[int]) -> None:
        if numbers:
            named = ", ".join(str(number) for number in sorted(numbers)[:_NAMED_NUMBERS])
            more = f" and {len(numbers) - _NAMED_NUMBERS} more" if len(numbers) > _NAMED_NUMBERS else ""
            raise UserError(
                f"--train-file {self.train_file}: {len(numbers)} numbers are also in --validation-file "
                f"{self.validation_file} ({named}{more}); take them out of one of the two"
            )

    def _example(self, number: int, draw: random.Random) -> Example:
        first = _first_addend(number, self.addends, draw)
        return Example(f"{number}=", number, f"{self.answer_prefix}{first} + {number - first}")

    def _parse_unseen(self, held_out: frozenset[int], row: dict[str, Any]) -> Example:
        example = self._parse(row)
        if example.number in held_out:
            raise RowProblem("instruction", f"a number that --validation-file does not have, got {example.number}")
        return example

    def _parse(self, row: dict[str, Any]) -> Example:
        for field in ("instruction", "output"):
            if not isinstance(row.get(field), str):
                raise RowProblem(field, f"text, got {_kind(row, field)}")
        if not isinstance(row.get("input", ""), str):
            raise RowProblem("input", f"text (may be empty or left out), got {_kind(row, 'input')}")
        question = row["instruction"] + row.get("input", "")
        asked = _QUESTION.fullmatch(question)
        if not asked:
            raise RowProblem("instruction", f"a number followed by =, such as '5=', got {question[:40]!r}")
        if not row["output"].startswith(self.answer_prefix):
            got = row["output"][:40]
            raise RowProblem(
                "output", f"an answer that begins with --answer-prefix {self.answer_prefix!r}, got {got!r}"
            )
        addends = self._addends_of(row["output"])
        if addends is None or sum(addends) != int(asked[1]):
            got = row["output"][len(self.answer_prefix) :][:40]
            raise RowProblem("output", f"two integers that sum to {int(asked[1])}, such as '1 + 4', got {got!r}")
        return Example(question, int(asked[1]), row["output"])


_BUILT_IN_ONLY = frozenset({"max_number", "train_examples", "validation_examples", "held_out", "addends", "data_seed"})


def _random(task: Math, purpose: str) -> random.Random:
    """A random generator for each purpose, so that more training rows do not change which numbers are held out."""
    return random.Random(f"{purpose} {task.data_seed}")


def _first_addend(number: int, how: str, draw: random.Random) -> int:
    """The first addend of `number` (at least 1); both addends are at least 1 if possible.

    Without carries, every digit of 2 or more is split between both addends, and the first addend has as many digits as
    the number. Digits of the same place are then easy to relate, and hardly any addend is small or 0.
    """
    if how == "uniform":
        return draw.randint(1, number - 1) if number > 1 else draw.randint(0, 1)
    leading, *others = (int(digit) for digit in str(number))
    while True:
        shares = [draw.randint(1, leading - 1) if leading > 1 else 1]
        shares += [draw.randint(1, digit - 1) if digit > 1 else draw.randint(0, digit) for digit in others]
        first = int("".join(map(str, shares)))
        if first < number or leading + sum(others) == 1:  # 1, 10, 100, ... only split without a carry as n + 0
            return first


def _with_rare_ones_often(numbers: list[int]) -> list[int]:
    """`numbers` with rare kinds repeated, which would otherwise be learnt last.

    Rare kinds are short numbers, and numbers that begin with 1: their second addend has fewer digits than the number.
    """
    share = {False: _KIND_SHARE, True: _ONE_SHARE}
    kinds: dict[tuple[int, bool], list[int]] = {}
    for number in numbers:
        digits = str(number)
        if digits.strip("0") != "1":  # 10, 100, ... split without a carry only as n + 0: no habit to learn
            kinds.setdefault((len(digits), digits[0] == "1"), []).append(number)
    return [
        number
        for (_, one), group in kinds.items()
        for number in group * min(math.ceil(max(1, share[one] * len(numbers) / len(group))), _MOST_REPEATS)
    ]


def _kind(row: dict[str, Any], field: str) -> str:
    return type(row[field]).__name__ if field in row else "nothing"
