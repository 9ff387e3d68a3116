"""Resamples the examples of an evaluation, for intervals of the task's metrics and for tests against other evaluations.

numpy and scipy are imported inside the functions, as in `significance`.
"""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.io.files import is_number, mapping, read_json, read_text, write_atomically
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.run_dir import RunDir
from accel_sft.results.labels import label_scores
from accel_sft.results.run_report import COSTS
from accel_sft.results.significance import RESAMPLES, Measured, needed, paired, resample

_FEWEST, _VISITS = 500, 200_000
"""Least number of resamples for an aggregate() of the task's own, and scores that it sees over all resamples if that
gives more."""
_LONGEST_SECONDS = 60.0

Aggregate = Callable[[Sequence[dict[str, Any]]], Mapping[str, Any]]


class _NotResampled(Exception):
    """Why metrics have no interval."""


def add_intervals(
    result: dict[str, Any],
    task: Task,
    before: Sequence[dict[str, Any]],
    after: Sequence[dict[str, Any]],
    run_dir: RunDir | None,
) -> None:
    """Add `intervals`, and the scores of labels, to a result with `before` and `after`, of which these are the answers;
    nothing without answers.

    Args:
        run_dir: where resamples of the main metric are kept if its noise is not known from the answers' scores alone,
            so that `read_measured` needs no task; None to keep none.
    """
    if not after:
        return
    intervals: dict[str, Any] = {"examples": len(after), "higher_is_better": task.higher_is_better}
    sides: dict[str, dict[str, Measured]] = {}
    without: dict[str, str] = {}
    for side, name, samples in (("before", "base", before), ("after", "tuned", after)):
        numbers = {
            key: n for key, n in (result[side] or {}).items() if key not in COSTS and key.split("/")[0] != "eval_loss"
        }
        sides[side], reasons = measured(numbers, samples, task.aggregate)
        spans = {key: one.interval() for key, one in sides[side].items()}
        intervals[side] = {key: list(span) for key, span in spans.items() if span}
        without |= {key: f"{name}: the same on every resample" for key, span in spans.items() if not span} | reasons
    tests = {key: paired(old, sides["after"][key]) for key, old in sides["before"].items() if key in sides["after"]}
    intervals["change"] = {key: {**test, "examples_needed": needed(test)} for key, test in tests.items() if test}
    result |= {"intervals": {**intervals, "without": without}, **label_scores(after, task.main_metric)}
    main = sides["after"].get(task.main_metric)
    if run_dir and main and main.each is None:
        kept = {"metric": task.main_metric, "value": main.value, "resamples": main.resampled}
        write_atomically(run_dir.resamples, json.dumps(kept) + "\n")


def read_measured(run_dir: RunDir, result: Mapping[str, Any]) -> Measured | None:
    """The main metric of a run's last evaluation; None if its noise is not known, or the files are damaged."""
    main = str(result.get("main_metric"))
    value, paths = mapping(result.get("after")).get(main), [run_dir.answers_of("tuned"), *run_dir.all_answers()[::-1]]
    path = next((path for path in paths if path.exists()), None)
    if path is None or not is_number(value) or not math.isfinite(value):
        return None
    try:
        samples = [mapping(json.loads(line)) for line in read_text(path).split("\n") if line]
        kept = mapping(read_json(run_dir.resamples)) if run_dir.resamples.exists() else {}
    except (OSError, ValueError, RecursionError, UserError):
        return None  # the page's answers name the file
    if (each := scores_of(samples, main, value)) is not None:
        return Measured(value, examples_of(samples), each)
    resamples = kept.get("resamples")
    if kept.get("metric") != main or kept.get("value") != value or not isinstance(resamples, list):
        return None
    numbers = [number for number in resamples if is_number(number)]
    return Measured(value, examples_of(samples), None, numbers) if len(numbers) == len(resamples) else None


def measured(
    metrics: Mapping[str, Any], samples: Sequence[dict[str, Any]], aggregate: Aggregate
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Each metric of an evaluation, and for those that cannot be resampled the reason.

    Args:
        metrics: the task's metrics of these answers; those of a `source` as `accuracy/a.jsonl`.
        samples: all answers of the evaluation, with `index`, `prompt` and `scores`.
        aggregate: the task's.
    """
    ends = {f"/{name}": name for name in dict.fromkeys(sample.get("source") for sample in samples) if name}
    found: dict[str, Measured] = {}
    without: dict[str, str] = {}
    left = dict(metrics)
    for end in [*sorted(ends, key=len, reverse=True), ""]:  # the longest: sources may be a.jsonl and b/a.jsonl
        some = {key.removesuffix(end): left.pop(key) for key in metrics if key in left and key.endswith(end)}
        answers = [each for each in samples if each.get("source") == ends[end]] if end else samples
        mine, reasons = _measured(some, answers, aggregate)
        found |= {key + end: one for key, one in mine.items()}
        without |= {key + end: reason for key, reason in reasons.items()}
    return {key: found[key] for key in metrics if key in found}, {k: without[k] for k in metrics if k in without}


def _measured(
    metrics: Mapping[str, Any], samples: Sequence[dict[str, Any]], aggregate: Aggregate
) -> tuple[dict[str, Measured], dict[str, str]]:
    examples, scores = examples_of(samples), [sample["scores"] for sample in samples]
    found, rest = {}, {}
    for key, value in metrics.items():
        if not is_number(value) or not math.isfinite(value):
            continue
        if (each := scores_of(samples, key, value)) is not None:
            found[key] = Measured(value, examples, each)
        else:
            rest[key] = value
    if not rest or not samples:
        return found, {}
    without = {}
    try:
        for key, resamples in zip(rest, _aggregates(aggregate, scores, rest), strict=True):
            if isinstance(resamples, str):
                without[key] = resamples
            else:
                found[key] = Measured(rest[key], examples, None, resamples)
    except _NotResampled as reason:
        without = dict.fromkeys(rest, str(reason))
    except Exception as error:  # noqa: BLE001 - it may need more different scores than a resample has; this is shown
        without = dict.fromkeys(rest, f"aggregate() fails on resampled examples ({type(error).__name__})")
    return found, without


def examples_of(samples: Sequence[Mapping[str, Any]]) -> list[Any]:
    """What `Measured.examples` holds."""
    return [[sample.get("index"), sample.get("prompt")] for sample in samples]


def scores_of(samples: Sequence[Mapping[str, Any]], key: str, value: float) -> list[float] | None:
    """Each example's score `key`, if they are numbers and `value` is their mean; else None."""
    found = [mapping(sample.get("scores")).get(key) for sample in samples]
    numbers = [float(score) for score in found if isinstance(score, bool) or is_number(score)]
    same = numbers and len(numbers) == len(found) and math.isclose(sum(numbers) / len(numbers), value, abs_tol=1e-9)
    return numbers if same else None


def _aggregates(
    aggregate: Aggregate, scores: Sequence[dict[str, Any]], values: Mapping[str, float]
) -> Iterator[list[float] | str]:
    """The metrics on resamples, or why there are none."""
    import numpy as np

    once, twice = dict(aggregate(scores)), dict(aggregate([*scores, *scores]))
    if any(not math.isclose(once.get(key, math.nan), value, abs_tol=1e-9) for key, value in values.items()):
        raise _NotResampled("aggregate() of the answers that were kept gives another number")
    until = time.monotonic() + _LONGEST_SECONDS

    def on_resamples(indices: Any) -> Any:
        found = []
        for row in indices.reshape(-1, len(scores)).tolist():
            if time.monotonic() > until:
                raise _NotResampled(f"aggregate() is too slow to resample within {_LONGEST_SECONDS:.0f} s")
            heartbeat()
            metrics = aggregate([scores[place] for place in row])
            found.append([metrics.get(key, math.nan) for key in values])
        return np.array(found, dtype=float).T.reshape(len(values), *indices.shape[:-1])

    count = min(RESAMPLES, max(_FEWEST, _VISITS // len(scores)))
    resampled = resample(len(scores), count, on_resamples) or [[] for _ in values]
    for (key, value), numbers in zip(values.items(), resampled, strict=True):
        missing = sum(not math.isfinite(number) for number in numbers)
        if not math.isclose(twice.get(key, math.nan), value, rel_tol=1e-6, abs_tol=1e-9):
            yield "it depends on the number of examples"
        elif missing or not numbers:
            yield "it is not defined on every resample of the examples" if numbers else "one example"
        else:
            yield numbers
