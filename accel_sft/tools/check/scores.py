"""Scores every example's expected answer with the task: if its score is not perfect, no model can get it right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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
    are between 0 and 1, else the best value of the split. The F1 of an example with nothing to find is 0 on its own,
    so an answer that is not perfect alone is scored once more together with a perfect one.

    Args:
        thinking: the value of `--thinking`; thinking that is kept is learnt but not scored.
    Attributes:
        unjudged: why answers cannot be scored one by one; empty if they can.
    """

    def __init__(self, task: Task, splits: dict[str, Sequence[Any]], thinking: str | None) -> None:
        self.task, self.splits, self._thinking = task, splits, thinking
        self.unjudged = ""
        self._perfect: dict[str, float] = {}
        self._beside: dict[str, dict[str, Any]] = {}

    def audit(self, split: str, usable: np.ndarray, findings: Findings) -> None:
        """Score each usable example's expected answer, and report the answers that are not perfect."""
        if self.task.main_metric in UNANSWERED:
            self.unjudged = "the validation loss is the main metric"
            return
        grade = "error" if split == "validation" else "warning"  # training rows are not scored in training
        values = np.full(len(usable), np.nan)
        scores: dict[int, dict[str, Any]] = {}
        for index in np.flatnonzero(usable).tolist():
            answer = self._answer(split, index)
            if answer is None:
                continue
            try:
                scores[index] = self._score(split, index, answer)
            except UserError as error:
                findings.add("D502", split, index, without_index(str(error), split, index), grade=grade)
                continue
            value = self._metric([scores[index]])
            if value is None:
                return
            values[index] = value
        scored_values = values[~np.isnan(values)]
        if not len(scored_values):
            return
        higher = self.task.higher_is_better
        best = float(scored_values.max() if higher else scored_values.min())
        self._perfect[split] = 1.0 if higher and best <= 1 and scored_values.min() >= 0 else best
        if len(perfect := np.flatnonzero(values == self._perfect[split])):
            self._beside[split] = scores[int(perfect[0])]
        for index in np.flatnonzero(~np.isnan(values) & (values != self._perfect[split])).tolist():
            if not self._is_perfect(split, scores[index]):
                answer = self._answer(split, index) or ""
                score = f"{self.task.main_metric} {values[index]:.4g}, not {self._perfect[split]:.4g}"
                findings.add("D501", split, index, f"{score}: {shortened(answer)}", grade=grade)

    def accepts(self, split: str, index: int, other: int) -> bool:
        """Whether the answer of `other` is perfect for the example `index` too."""
        answer = self._answer(split, other)
        if split not in self._perfect or answer is None:
            return False
        try:
            return self._is_perfect(split, self._score(split, index, answer))
        except UserError:
            return False

    def _answer(self, split: str, index: int) -> str | None:
        """The text of an example's answer; None if the answer calls tools: only the chat template writes calls."""
        chat = conversation(self.task, self.splits[split], split, index)
        return None if chat.calls else wanted(chat, self._thinking)

    def _score(self, split: str, index: int, text: str) -> dict[str, Any]:
        """The task's score of `text` as the answer; raises UserError if score() fails."""
        return scored(self.task, self.splits[split], index, text, split)

    def _metric(self, scores: list[dict[str, Any]]) -> float | None:
        """The main metric of answers with these scores; None if aggregate() fails, as it may on so few answers."""
        try:
            return float(self.task.aggregate(scores)[self.task.main_metric])
        except Exception as error:  # noqa: BLE001 - some metrics need more than one answer
            cause = f"{type(error).__name__}: {error}".strip(": ")
            self.unjudged = one_line(
                f"aggregate() gives no {self.task.main_metric} of one answer ({cause})", LONGEST_ERROR
            )
            return None

    def _is_perfect(self, split: str, scores: dict[str, Any]) -> bool:
        alone, best = self._metric([scores]), self._perfect[split]
        beside = self._beside.get(split)
        return alone == best or (beside is not None and self._metric([beside, scores]) == best)
