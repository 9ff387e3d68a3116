"""Where a run's time goes, and why its GPU idles: by readings of the real form."""

from __future__ import annotations

import contextlib
import math
import re
import time

import pytest
from conftest import finished
from reference_job import FP32, ONCE, own_task

from accel_sft.results.run_report import render_report
from accel_sft.tracking.idle import WARMUP_STEPS, IdleWatch
from accel_sft.tracking.system import Reading, Readings
from accel_sft.tracking.time_spent import (
    BACKWARD,
    BATCHES,
    COMMUNICATION,
    FORWARD,
    OPTIMIZER,
    PAUSE,
    TimeSpent,
    span,
    taken,
)
from accel_sft.tracking.tracker import traced_steps


def test_step_time_divides_without_rest_and_without_evaluations():
    time = TimeSpent()
    assert time.totals() is None
    spent = {BATCHES: 0.01, FORWARD: 0.02, BACKWARD: 0.04, COMMUNICATION: 0.005, OPTIMIZER: 0.015}
    time.add(0.1, spent)
    time.add(0.1, {**spent, PAUSE: 50.0})
    totals = time.totals()
    twice = {name: 2 * seconds for name, seconds in spent.items()}
    assert totals["parts"] == pytest.approx(twice | {"the rest": 0.02})
    assert (totals["steps"], totals["seconds"]) == (2, pytest.approx(0.2))
    sentence = (
        "a step took 0.1 s on average over 2 steps: 40% backward, 20% forward, 15% optimizer step, 10% make batch, "
        "10% the rest, 5% wait for ranks"
    )
    assert f"On rank 0 {sentence}." in render_report({"steps": 3, "time_spent": totals}, [], [])


def test_spans_count_what_is_done_in_them():
    taken()
    with span(FORWARD):
        time.sleep(0.2)
    for _ in range(2):
        with span(BATCHES):
            pass
    seconds, times = taken()
    assert seconds[FORWARD] > 0.2 > seconds[BATCHES] > 0
    assert times == {FORWARD: 1, BATCHES: 2}
    assert taken() == ({}, {})


@pytest.mark.parametrize("steps", [2, 3])
def test_trace_that_an_error_ends_is_named_or_too_short(tmp_path, steps):
    printed = []
    with contextlib.suppress(KeyboardInterrupt), traced_steps(tmp_path, 0, printed.append) as profiler:
        for _ in range(steps):
            profiler.step()
        if steps == 3:
            raise KeyboardInterrupt
    assert (str(tmp_path) if steps == 3 else "begins at step 3 after a start") in printed[-1]
    assert steps < 3 or [*tmp_path.iterdir()]


# --- a GPU that idles ---

SECONDS = {FORWARD: 0.2, BACKWARD: 0.3}


def watched(
    watch, steps, percent=20.0, *, begin=1, spent=None, tokens=64_000, forwards=4, ranks=1, pauses=(), waits=None
):
    """The warnings of steps of a second; a rank's GPU is used by `percent`, rank 0's by 90 where there are others.

    `waits` are the seconds by which each rank's forwards take less than half of a step; NaN: forwards are not measured.
    """
    waits, readings, warnings = waits or [0.0] * ranks, Readings(), []
    for number in range(begin, begin + steps):
        use = [90.0] * (ranks - 1) + [percent(number) if callable(percent) else percent]
        system = [
            Reading(number, 100.0, 1.0, 1.0, gpu_percent, 1.0, number * (0.5 - wait))
            for gpu_percent, wait in zip(use, waits, strict=True)
        ]
        record = {"step": number, "tokens": tokens, "seconds": 1.0}
        seconds = {**SECONDS, **(spent or {})}
        new = readings.new(system, number in pauses)
        warnings.append(watch.step(record, seconds, {BATCHES: forwards + 2}, new, ranks))
    return [*filter(None, warnings)]


CAUSES = {
    "batches": ({"spent": {BATCHES: 0.34}}, "making batches takes 34% of a step: look at"),
    "ranks that wait in their forwards": ({"waits": [math.nan] * 2, "ranks": 2}, "30% of a step is spent on: backward"),
    "small forwards": ({"tokens": 1024, "forwards": 8}, "a forward has 128 tokens"),
    "the optimizer": ({"spent": {OPTIMIZER: 0.4}}, "40% of a step is spent on: optimizer step; see --profile"),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_an_idle_gpu_is_named_once_with_its_likely_cause(cause):
    given, expected = CAUSES[cause]
    (warning,) = watched(IdleWatch(), 200, **given)
    whose = "the GPU of rank 1" if given.get("ranks") else "the GPU"
    assert warning.startswith(f"{whose} idles: a kernel ran in 20% of the time in steps {WARMUP_STEPS + 1} to ")
    assert expected in warning
    assert len(warning) <= 160


def test_start_evaluation_and_busy_gpu_give_no_warning():
    watch = IdleWatch()
    assert watched(watch, 100, 90.0) == []
    assert len(watched(watch, 100, 10.0, begin=101)) == 1
    assert watched(IdleWatch(), 60, lambda number: 5.0 if number <= WARMUP_STEPS else 90.0) == []
    after_pauses = range(12, 200, 2)  # the reading after each is that of the evaluation
    assert watched(IdleWatch(), 190, lambda n: 1.0 if n in after_pauses else 95.0, pauses=after_pauses) == []
    assert watched(IdleWatch(), 200, math.nan) == []


def test_waiting_rank_is_named_though_nvml_shows_it_busy():
    (warning,) = watched(IdleWatch(), 200, 100.0, ranks=3, waits=[0.5, 0.12, 0.1])
    assert warning.startswith("rank 0 waits for rank 2 for 40% of a step or longer, in steps")
    assert watched(IdleWatch(), 200, 100.0, ranks=2, waits=[0.09, 0.0]) == []
    assert watched(IdleWatch(), 200, 100.0, ranks=2, waits=[math.nan, math.nan]) == []


SLOW = """
def __post_init__(self):
    import time
    from accel_sft.tracking import idle, system

    def slow(module, inputs):
        if isinstance(module, torch.nn.Embedding) and module.training and os.environ["RANK"] == "1":
            time.sleep(0.3)

    torch.nn.modules.module.register_module_forward_pre_hook(slow)
    idle.WARMUP_STEPS, idle.WINDOW_STEPS, idle.WINDOW_READINGS = 2, 4, 3
    system.SystemSampler._gpu = lambda sampler: (100.0, 1.0)
    system.SystemSampler.__init__.__kwdefaults__["seconds_between"] = 0.0
"""
"""Rank 1 is slow in each forward; a GPU is read in each step."""


@pytest.mark.parametrize("yaml", ["ddp", *(pytest.param(yaml, marks=pytest.mark.long) for yaml in ("z2", "z3"))])
def test_rank_that_waits_for_a_slow_rank_says_so(tmp_path, yaml):
    job = (own_task(tmp_path, SLOW), *ONCE, "--max-steps", "8", "--global-batch-size", "8", "--train-examples", "60")
    run = finished(*job, "--tracker", "none", run_dir=tmp_path / "run", yaml=yaml, launcher=FP32)
    said = re.findall(r"rank (\d) waits for rank (\d) for (\d+)% of a step or longer", " ".join(run.output.split()))
    assert [line[:2] for line in said] == ([] if yaml == "z3" else [("0", "1")])  # where it is not measured
    assert all(int(share) > 10 for *_, share in said)
