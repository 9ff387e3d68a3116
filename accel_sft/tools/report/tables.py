"""Makes the rows of the page's tables: runs, scores, tests against the best run, and settings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number, mapping
from accel_sft.io.text import one_line, shown
from accel_sft.results.resampled import read_measured
from accel_sft.results.run_report import comparison_rows, sources_text
from accel_sft.results.significance import Measured, against_best, span, verdict, words_for
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.metrics_file import mean_mfu

_LONGEST = 300
"""Maximum number of characters of a setting's value."""
_ABSENT = "(not recorded)"
_TRIVIAL = {"config": {"output_dir", "resume", "dry_run"}, "launch": {"deepspeed_config", "yaml"}}
"""Settings left out of the table, since they differ in every run or are shown elsewhere on the page."""
_SECTIONS = {"config": "setting", "task_options": "task's setting", "launch": "launch", "data": "data"}


def run_row(run: Run) -> dict[str, Any]:
    """A run's row in the table of runs: numbers from result.json, or from its steps so far if it has not ended."""
    seconds = [row["seconds"] for row in run.steps if is_number(row.get("seconds"))]
    tokens = [row["tokens"] for row in run.steps if is_number(row.get("tokens"))]
    so_far = {
        "train_seconds": sum(seconds) if seconds else None,
        "tokens_per_second": sum(tokens) / sum(seconds) if tokens and sum(seconds) else None,
        "mfu": mean_mfu(run.steps),
    }
    config = mapping(run.record.get("config"))
    return {
        "name": run.name,
        "mixed": one_line(sources_text(run.result.get("sources")), 600),
        "model": config.get("init_from") or config.get("model") or run.result.get("model"),
        "launch": _launch(mapping(run.record.get("launch"))),
        "step": run.last_step,
        "total_steps": run.record.get("total_steps"),
        **{key: run.result.get(key, value) for key, value in so_far.items()},
        **{key: run.result.get(key) for key in ("peak_device_memory_gib", "peak_host_memory_gib")},
    }


def _launch(launch: dict[str, Any]) -> str:
    processes, stage = launch.get("processes"), launch.get("zero_stage")
    parts = [str(launch.get("backend") or "")]
    parts += [f"ZeRO {stage}"] if stage is not None else []
    parts += [f"{processes} process" + ("" if processes == 1 else "es")] if processes is not None else []
    precision = str(launch.get("precision") or "")
    return ", ".join(filter(None, [*parts, "float32" if precision == "no" else precision]))


def scores(runs: Sequence[Run]) -> dict[str, Any]:
    """The first and the last evaluation of each run that has evaluations: `columns`, the names of these runs; `rows`,
    each a label and, for each column, (base, tuned, change)."""
    by_run: dict[str, dict[str, tuple[str, str, str]]] = {}
    for run in runs:
        before, after = run.section("before"), run.section("after")
        if not after and run.evaluations:
            before, after = ({k: n for k, n in run.evaluations[place].items() if k != "step"} for place in (0, -1))
            first, last = (run.evaluations[place]["step"] for place in (0, -1))
            if first == last:  # a single evaluation, of the base or the tuned model: there is no change to show
                before, after = (before, {}) if first == 0 else ({}, after)
        if lines := comparison_rows(before, after, run.result):
            by_run[run.name] = {one_line(label, 80): (base, tuned, change) for label, base, tuned, change in lines}
    labels = dict.fromkeys(label for lines in by_run.values() for label in lines)
    rows = [(label, [lines.get(label, ("", "", "")) for lines in by_run.values()]) for label in labels]
    return {"columns": [*by_run], "rows": rows}


def against_best_run(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """For each task with two measured runs or more: `metric`, and `rows`, the best run first. A row has the run's name,
    its metric with an interval, and how it compares with the best run on the same examples."""
    groups: dict[tuple[str, str], dict[str, Measured]] = {}
    higher: dict[tuple[str, str], bool] = {}
    for run in runs:
        if measured := read_measured(run.folder, run.result):
            key = run.task, str(run.result.get("main_metric"))
            groups.setdefault(key, {})[run.name] = measured
            higher[key] = run.section("intervals").get("higher_is_better") is not False
    tables = []
    for key, of_runs in groups.items():
        if len(of_runs) < 2:
            continue
        best, *others = sorted(of_runs, key=lambda name: of_runs[name].value, reverse=higher[key])
        tests = against_best(of_runs, best)
        rows = [(best, _with_interval(of_runs[best]), "the best of these")]
        for name in others:
            test = tests[name]
            result = verdict(test, words_for(higher[key])) if test else "not tested: other examples, or too few"
            rows.append((name, _with_interval(of_runs[name]), result))
        tables.append({"metric": key[1], "rows": rows})
    return tables


def _with_interval(measured: Measured) -> str:
    interval = measured.interval()
    return shown(measured.value) + (f" ({span(*interval)})" if interval else "")


def settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Options and chosen batching of each run that has a run.json; for a comparison's setting, those of its first run.
    `columns` are the names of the runs; `differing`, rows of (kind, name, a value for each column); `common`, rows of
    (kind, name, the value that all share)."""
    columns: dict[str, Run] = {}
    for run in runs:
        if run.record:
            columns.setdefault(run.series, run)
    flat = [_flat(run) for run in columns.values()]
    differing, common = [], []
    for kind, name in dict.fromkeys(key for of_run in flat for key in of_run):
        values = [of_run.get((kind, name), _ABSENT) for of_run in flat]
        if len(set(values)) > 1:
            differing.append((kind, name, values))
        else:
            common.append((kind, name, values[0]))
    return {"columns": [*columns], "differing": differing, "common": common}


def _flat(run: Run) -> dict[tuple[str, str], str]:
    flat: dict[tuple[str, str], str] = {}
    for section, kind in _SECTIONS.items():
        values = mapping(run.record.get(section))
        trivial = _TRIVIAL.get(section, ())
        _flatten(flat, kind, "", {key: value for key, value in values.items() if key not in trivial})
    for key in ("data_sha256", "task_code"):
        if key in run.record:
            flat["data", key] = _text(run.record[key])[:12]
    _flatten(flat, "chosen batching", "", run.section("batching"))
    return flat


def _flatten(flat: dict[tuple[str, str], str], kind: str, prefix: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _flatten(flat, kind, f"{prefix}{key}.", value)
        else:
            flat[kind, _text(f"{prefix}{key}")] = _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text) - _LONGEST:,} more characters)"
