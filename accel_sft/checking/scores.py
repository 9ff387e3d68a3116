"""Scores every example's own answer by the task: what is not perfect there, no model can get right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.checking.findings import Findings
from accel_sft.checking.texts import shortened, without_index
from accel_sft.data.conversation import conversation
from accel_sft.data.form import split_thinking
from accel_sft.evaluation.scoring import scored


class OwnScores:
    """The task's score of answers, by its main metric, one at a time.

    Args:
        thinking: as `--thinking` has it; what is kept of thinking is learnt but not scored.
    """

    def __init__(self, task: Task, splits: dict[str, Sequence[Any]], thinking: str) -> None:
        self.task, self.splits, self._keeps = task, splits, thinking == "keep"
        self.perfect: dict[str, float] = {}
        self.unjudged = ""

    def value(self, split: str, index: int, text: str) -> float | None:
        """The main metric of one answer; None where the task cannot say it of a single one.

        Raises:
            UserError: score() fails.
        """
        task, main = self.task, self.task.main_metric
        scores = scored(task, self.splits[split], index, text, split)
        if not isinstance(value := scores.get(main), (int, float)):
            try:
                value = task.aggregate([scores])[main]
            except Exception as error:  # noqa: BLE001 - some metrics need more than one answer
                self.unjudged = f"aggregate() gives no {main} of a single answer ({type(error).__name__})"
                return None
        return float(value)

    def answer(self, split: str, index: int) -> str:
        target = conversation(self.task, self.splits[split], split, index)[1]
        return split_thinking(target)[1] if self._keeps else target

    def audit(self, split: str, usable: np.ndarray, found: Findings) -> None:
        """Score each usable example's own answer, and report those that are not perfect.

        Perfect is 1 where every score lies within 0 and 1 and higher is better, else the best that any answer gets.
        """
        grade = "error" if split == "validation" else "warning"  # training rows are not scored in training
        values = np.full(len(usable), np.nan)
        for index in np.flatnonzero(usable).tolist():
            try:
                value = self.value(split, index, self.answer(split, index))
            except UserError as error:
                found.add("D502", split, index, without_index(str(error), split, index), grade=grade)
                continue
            if value is None:
                return
            values[index] = value
        known = values[~np.isnan(values)]
        if not len(known):
            return
        higher = self.task.higher_is_better
        best = float(known.max() if higher else known.min())
        perfect = 1.0 if higher and best <= 1 and known.min() >= 0 else best
        self.perfect[split] = perfect
        for index in np.flatnonzero(values < perfect if higher else values > perfect).tolist():
            score = f"{self.task.main_metric} {values[index]:.4g}, not {perfect:.4g}"
            found.add("D501", split, index, f"{score}: {shortened(self.answer(split, index))}", grade=grade)

    def accepts(self, split: str, index: int, other: int) -> bool:
        """Whether the answer of `other` is perfect for the example `index` too."""
        if split not in self.perfect:
            return False
        try:
            value = self.value(split, index, self.answer(split, other))
        except UserError:
            return False
        perfect = self.perfect[split]
        return value is not None and (value >= perfect if self.task.higher_is_better else value <= perfect)
