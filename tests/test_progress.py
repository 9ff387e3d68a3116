"""The job's own metric decides which weights are best, in either direction."""

from __future__ import annotations

import math

import pytest

from accel_sft.progress import Progress


@pytest.mark.parametrize(
    ("higher_is_better", "values", "best_step", "without_better"),
    [
        (True, [0.1, 0.5, 0.5, 0.2], 2, 2),
        (False, [3.0, 1.0, 2.0, 0.5], 4, 0),
        (True, [math.nan, 0.0, math.nan], 2, 1),
    ],
)
def test_the_best_is_the_first_of_the_best(higher_is_better, values, best_step, without_better):
    progress = Progress()
    told = []
    for progress.step, value in enumerate(values, 1):
        told.append(progress.judged(value, higher_is_better))
    assert (progress.best_step, progress.without_better) == (best_step, without_better)
    assert progress.best == values[best_step - 1]
    assert told.index(True) <= best_step - 1
