"""The job's own metric decides which weights are best, in either direction."""

from __future__ import annotations

import math

import pytest

from accel_sft.training.state import TrainState


@pytest.mark.parametrize(
    ("higher_is_better", "values", "losses", "best_step", "without_better"),
    [
        (True, [0.1, 0.5, 0.5, 0.2], [1.0, 1.0, 1.0, 0.1], 2, 2),
        (True, [0.1, 0.5, 0.5, 0.5], [1.0, 2.0, 1.0, math.nan], 3, 2),  # patience is about the metric alone
        (False, [3.0, 1.0, 2.0, 0.5], [1.0, 1.0, 0.1, 2.0], 4, 0),
        (True, [math.nan, 0.0, math.nan], [0.1, 1.0, 0.1], 2, 1),
    ],
)
def test_best_is_the_earliest_among_equals_of_lowest_loss(higher_is_better, values, losses, best_step, without_better):
    state = TrainState()
    improved = []
    for state.step, (value, loss) in enumerate(zip(values, losses, strict=True), 1):
        improved.append(state.update_best(value, loss, higher_is_better))
    assert (state.best_step, state.without_better) == (best_step, without_better)
    assert state.best == values[best_step - 1]
    assert max(step for step, better in enumerate(improved, 1) if better) == best_step
