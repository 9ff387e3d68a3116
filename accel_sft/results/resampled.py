"""Collects an evaluation's scores, for intervals and tests of its metrics; resamples metrics that are not means."""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.io.files import is_number, mapping, read_json, read_json_lines, write_atomically
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.run_dir import RunDir
from accel_sft.results.labels import label_scores
from accel_sft.results.run_report import COSTS, NOT_OF_ANSWERS
from accel_sft.results.significance import Measured, needed, paired

_FEWEST, _MOST, _VISITS = 500, 2000, 200_000
"""Minimum and maximum number of resamples. Within these limits, all resamples together have about `_VISITS` scores."""
_LONGEST_SECONDS = 60.0

Aggregate = Callable[[Sequence[dict[str, Any]]], Mapping[str, Any]]


def add_intervals(
    result: dict[str, Any],
    task: Task,
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    run_dir: RunDir | None,
) -> None:
    """Add `intervals`, and scores by label, to a result; `before` and `after` are the answers of its two evaluations.
    Without answers in `after`, nothing is added. If the main metric is not a mean of scores, its resamples are written
    into `run_dir`, so that `read_measured` can test it without the task's aggregate()."""
    if not after:
        return
    intervals: dict[str, Any] = {"examples": len(after), "higher_is_better": task.higher_is_better}
    sides: dict[str, dict[str, Measured]] = {}
    without: dict[str, str] = {}
    for side, name, samples in (("before", "base", before), ("after", "tuned", after)):
        of_answers = {key: n for key, n in (result[side] or {}).items() if key not in (*COSTS, *NOT_OF_ANSWERS)}
        sides[side], reasons = measured(of_answers, samples, task.aggregate)
        spans = {key: one.interval() for key, one in sides[side].items()}
        intervals[side] = {key: list(span) for key, span in spans.items() if span}
        without |= {key: f"{name}: all examples have equal scores" for key, span in spans.items() if not span} | reasons
    tests = {key: paired(old, sides["after"][key]) for key, old in sides["before"].items() if key in sides["after"]}
    intervals["change"] = {key: {**test, "examples_needed": needed(test)} for key, test in tests.items() if test}
    result |= {"intervals": {**intervals, "without": without}, **label_scores(after, task.main_metric)}
    main = sides["after"].get(task.main_metric)
    if run_dir and main and main.scores is None:
        content = {"metric": task.main_metric, "value": main.value, "resamples": main.resampled}
        write_atomically(run_dir.resamples, json.dumps(content) + "\n")


def read_measured(run_dir: RunDir, result: Mapping[str, Any]) -> Measured | None:
    """The main metric of a run's last evaluation; None if its noise is not known, or the files are damaged."""
    main = str(result.get("main_metric"))
    value, paths = mapping(result.get("after")).get(main), [run_dir.answers_of("tuned"), *run_dir.all_answers()[::-1]]
    path = next((path for path in paths if path.exists()), None)
    if path is None or not is_number(value) or not math.isfinite(value):
        return None
    try:
        samples, unreadable = read_json_lines(path)
        stored = mapping(read_json(run_dir.resamples)) if run_dir.resamples.exists() else {}
    except (OSError, UserError):
        return None  # the report's section of answers names the damaged file
    if not unreadable and (scores := scores_of(samples, main, value)) is not None:
        return Measured(value, examples_of(samples), scores)
    resamples: Any = stored.get("resamples")
    known = (stored.get("metric"), stored.get("value")) == (main, value) and isinstance(resamples, list)
    if unreadable or not known or not all(map(is_number, resamples)):
        return None
    return Measured(value, examples_of(samples), None, resamples)


def measured(
    metrics: Mapping[str, Any], samples: Sequence[dict[str, Any]], aggregate: Aggregate
) -> tuple[dict[str, Measured], dict[str, str]]:
    """The metrics of an evaluation with these answers, and for each metric that cannot be resampled, the reason."""
    examples, finite = examples_of(samples), {k: n for k, n in metrics.items() if is_number(n) and math.isfinite(n)}
    means = {key: scores for key, n in finite.items() if (scores := scores_of(samples, key, n)) is not None}
    results = {key: Measured(finite[key], examples, scores) for key, scores in means.items()}
    rest = {key: value for key, value in finite.items() if key not in means}
    if not rest or not samples:
        return results, {}
    try:
        numbers, without = _resampled(aggregate, [sample["scores"] for sample in samples], rest)
    except Exception as error:  # noqa: BLE001 - e.g. too few different scores in a resample; the reason is shown
        return results, dict.fromkeys(rest, f"aggregate() fails on resampled examples ({type(error).__name__})")
    return results | {key: Measured(rest[key], examples, None, values) for key, values in numbers.items()}, without


def examples_of(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Index and prompt of each example, for `Measured.examples`."""
    return [[sample.get("index"), sample.get("prompt")] for sample in samples]


def scores_of(samples: Sequence[Mapping[str, Any]], key: str, value: float) -> list[float] | None:
    """The examples' scores `key` if all are numbers with the mean `value`; else None."""
    scores: list[Any] = [mapping(sample.get("scores")).get(key) for sample in samples]
    if not scores or not all(isinstance(score, bool) or is_number(score) for score in scores):
        return None
    return [*map(float, scores)] if math.isclose(sum(scores) / len(scores), value, abs_tol=1e-9) else None


def _resampled(
    aggregate: Aggregate, scores: Sequence[dict[str, Any]], values: Mapping[str, float]
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The metrics' values on resamples of the examples, and for other metrics the reason why they have none. Equal
    numbers of examples get the same resamples."""
    import numpy as np

    once, twice = dict(aggregate(scores)), dict(aggregate([*scores, *scores]))
    if any(not math.isclose(once.get(key, math.nan), value, abs_tol=1e-9) for key, value in values.items()):
        return {}, dict.fromkeys(values, "aggregate() of the stored answers gives a different number")
    if len(scores) < 2:
        return {}, dict.fromkeys(values, "there is only one example")
    until, random = time.monotonic() + _LONGEST_SECONDS, np.random.default_rng(0)
    rows = []
    for _ in range(min(_MOST, max(_FEWEST, _VISITS // len(scores)))):
        if time.monotonic() > until:
            return {}, dict.fromkeys(values, f"aggregate() is too slow to resample within {_LONGEST_SECONDS:.0f} s")
        heartbeat()
        rows.append(aggregate([scores[place] for place in random.integers(len(scores), size=len(scores)).tolist()]))
    numbers = {key: [float(row.get(key, math.nan)) for row in rows] for key in values}
    without = {
        key: "it is not defined on every resample" for key in values if not all(map(math.isfinite, numbers[key]))
    }
    for key, value in values.items():
        if not math.isclose(twice.get(key, math.nan), value, rel_tol=1e-6, abs_tol=1e-9):
            without[key] = "it depends on the number of examples"
    return {key: row for key, row in numbers.items() if key not in without}, without
