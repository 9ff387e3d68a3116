"""Scores each example's expected answer with the task: if this score is not perfect, no model's score can be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation, wanted
from accel_sft.evaluation.scoring import UNANSWERED, scored
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.texts import shortened, without_index


class OwnScores:
    """Scores expected answers by the task's main metric.

    An answer is perfect if its metric has the best possible value: 1 if higher is better and all values of the split
    are between 0 and 1, else the best value of the split. An example with nothing to find has F1 0 on its own. So an
    answer that is not perfect on its own is scored again, together with a perfect answer. `unjudged` says why answers
    cannot be scored one by one; it is empty if they can.
    """

    def __init__(self, task: Task, splits: dict[str, Sequence[Any]], thinking: str | None) -> None:
        self.task, self.splits, self._thinking = task, splits, thinking
        self.unjudged = ""
        self._perfect: dict[str, float] = {}
        self._beside: dict[str, list[dict[str, Any]]] = {}

    def audit(self, split: str, indices: Sequence[int], findings: Findings) -> None:
        """Score these examples' expected answers, and report the answers that are not perfect."""
        if self.task.main_metric in UNANSWERED:
            self.unjudged = "the validation loss is the main metric"
            return
        grade = "error" if split == "validation" else "warning"  # training does not score training rows
        scores: dict[int, dict[str, Any]] = {}
        values: dict[int, float] = {}
        for index in indices:
            chat = conversation(self.task, self.splits[split], split, index)
            if chat.calls:
                continue
            answer = wanted(chat, self._thinking)
            try:
                scores[index] = scored(self.task, self.splits[split], index, answer, split)
            except UserError as error:
                findings.add("D502", split, index, without_index(str(error), split, index), grade=grade)
                continue
            value = self._metric([scores[index]])
            if value is None:
                return
            if not math.isnan(value):
                values[index] = value
                if chat.rejected:
                    other = wanted(chat._replace(answer=chat.rejected), self._thinking)
                    self._compare_rejected(split, index, value, other, findings)
        if not values:
            return
        least, most, higher = min(values.values()), max(values.values()), self.task.higher_is_better
        perfect = 1.0 if higher and least >= 0 and most <= 1 else most if higher else least
        self._perfect[split] = perfect
        self._beside[split] = next(([scores[index]] for index, value in values.items() if value == perfect), [])
        for index, value in values.items():
            if value != perfect and not self._is_perfect(split, scores[index]):
                detail = f"{self.task.main_metric} {value:.4g}, not {perfect:.4g}: "
                findings.add("D501", split, index, detail + shortened(self._answer(split, index) or ""), grade=grade)

    def _compare_rejected(self, split: str, index: int, value: float, text: str, findings: Findings) -> None:
        """Report an example whose rejected answer `text` has a better value than its expected answer's `value`."""
        try:
            other = self._metric([scored(self.task, self.splits[split], index, text, split)])
        except UserError:  # an answer that cannot be scored is no better
            return
        if other is not None and (other > value if self.task.higher_is_better else other < value):
            detail = f"{self.task.main_metric} {other:.4g}, but {value:.4g} of the chosen answer: "
            findings.add("D503", split, index, detail + shortened(text))

    def accepts(self, split: str, index: int, other: int) -> bool:
        """Whether the answer of example `other` is perfect for example `index` too."""
        answer = self._answer(split, other)
        if split not in self._perfect or answer is None:
            return False
        try:
            return self._is_perfect(split, scored(self.task, self.splits[split], index, answer, split))
        except UserError:
            return False

    def _answer(self, split: str, index: int) -> str | None:
        """The text of an example's answer; None if the answer calls tools: only the chat template writes calls."""
        chat = conversation(self.task, self.splits[split], split, index)
        return None if chat.calls else wanted(chat, self._thinking)

    def _metric(self, scores: list[dict[str, Any]]) -> float | None:
        """The main metric of answers with these scores; None if aggregate() fails, as it may on few answers."""
        try:
            return float(self.task.aggregate(scores)[self.task.main_metric])
        except Exception as error:  # noqa: BLE001 - some metrics need more than one answer
            cause = f"{type(error).__name__}: {error}".strip(": ")
            self.unjudged = one_line(
                f"aggregate() cannot compute {self.task.main_metric} from a single answer ({cause})", LONGEST_ERROR
            )
            return None

    def _is_perfect(self, split: str, scores: dict[str, Any]) -> bool:
        perfect = self._perfect[split]
        return self._metric([scores]) == perfect or self._metric([*self._beside[split], scores]) == perfect
