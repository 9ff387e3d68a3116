"""Law 1: which examples a step learns from depends on data, seed and global batch size, and on nothing else."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from accel_sft.api.config import TrainConfig
from accel_sft.data.step_plan import StepPlan
from accel_sft.training.prepare import Prepared

GENERATOR = np.random.default_rng(0)
LENGTHS = GENERATOR.integers(4, 90, 23)
SUPERVISED = np.maximum(LENGTHS // 3, 1)


def plan(global_batch_size=5, epochs=3.0, max_steps=None, seed=1):
    return StepPlan(
        LENGTHS, SUPERVISED, seed=seed, global_batch_size=global_batch_size, epochs=epochs, max_steps=max_steps
    )


@pytest.mark.parametrize("global_batch_size", [1, 5, 40])
@pytest.mark.parametrize("epochs", [1.0, 3.0])
def test_every_example_is_seen_once_an_epoch(global_batch_size, epochs):
    steps = plan(global_batch_size, epochs)
    seen = np.concatenate([steps.examples(step) for step in range(steps.total_steps)])
    assert len(seen) == epochs * 23
    for epoch in np.split(seen, int(epochs)):
        assert sorted(epoch) == list(range(23))


def test_epochs_are_shuffled_differently_and_seeds_too():
    steps = plan(23, 2.0)
    assert list(steps.examples(0)) != list(steps.examples(1))
    assert list(steps.examples(0)) != list(plan(23, 2.0, seed=2).examples(0))


def test_a_step_is_a_pure_function():
    forward, backward = plan(), plan()
    steps = range(forward.total_steps)
    there = [list(forward.examples(step)) for step in steps]
    back = [list(backward.examples(step)) for step in reversed(steps)]
    assert there == back[::-1]


@pytest.mark.parametrize(
    ("batch", "epochs", "steps", "expected"),
    [(23, 9.0, None, False), (24, 9.0, None, True), (24, 1.0, None, False), (24, None, 1, True)],
)
def test_a_step_with_some_rows_twice_is_announced(batch, epochs, steps, expected):
    rows = type("Kept", (list,), {"examples": 23})(range(23))
    split = SimpleNamespace(kept=rows, left_out={}, lines=list, examples=())
    assembly = SimpleNamespace(config=TrainConfig(), source=SimpleNamespace(adapter=None), template=None)
    lines = Prepared(None, assembly, split, split, plan(batch, epochs, steps)).lines
    repeated = len({*plan(batch, epochs, steps).examples(0)}) < len(plan(batch, epochs, steps).examples(0))
    assert ("--global-batch-size 24 is more than the rows" in str(lines)) is expected is repeated


def test_the_epoch_ends_where_it_ends():
    steps = plan(5, 3.0)
    ends = [step for step in range(1, steps.total_steps + 1) if steps.ends_epoch(step)]
    assert ends == [math.ceil(23 * epoch / 5) for epoch in (1, 2, 3)]
    assert steps.epoch(steps.total_steps) == 3.0


def test_a_fraction_of_an_epoch_is_at_least_one_step():
    assert plan(5, 0.01).total_steps == 1
    assert len(plan(5, 0.01).examples(0)) == 1
