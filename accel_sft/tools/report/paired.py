"""Tests the page's runs against the best run of their task, by the task's main metric on the same examples."""

from collections.abc import Sequence
from typing import Any

from accel_sft.io.text import shown
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.resampled import read_measured
from accel_sft.tracking.significance import Measured, against_best, span, verdict, words_for


def paired_runs(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each task with two measured runs or more: `metric`, and `rows` with the best run first, each the run's name,
    its metric with an interval, and how it compares with the best."""
    groups: dict[tuple[str, str], dict[str, Measured]] = {}
    higher: dict[tuple[str, str], bool] = {}
    for run in runs:
        if measured := read_measured(run.folder, run.result):
            key = run.task, str(run.result.get("main_metric"))
            groups.setdefault(key, {})[run.name] = measured
            higher[key] = run.section("intervals").get("higher_is_better") is not False
    found = []
    for key, measured_runs in groups.items():
        if len(measured_runs) < 2:
            continue
        names = sorted(measured_runs, key=lambda name: measured_runs[name].value, reverse=higher[key])
        tests = against_best(measured_runs, names[0])
        rows = [(names[0], _told(measured_runs[names[0]]), "the best of these")]
        for name in names[1:]:
            test = tests[name]
            told = verdict(test, words_for(higher[key])) if test else "not tested: other examples, or too few"
            rows.append((name, _told(measured_runs[name]), told))
        found.append({"metric": key[1], "rows": rows})
    return found


def _told(measured: Measured) -> str:
    interval = measured.interval()
    return shown(measured.value) + (f" ({span(*interval)})" if interval else "")
