"""Reads comparison.json for the page: its findings, its cells, and the folders of their runs."""

import dataclasses
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import mapping, read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line
from accel_sft.tools.report.runs import COMPARISON, Run, read_run
from accel_sft.tracking.run_report import is_number

SCHEMA = 1


@dataclasses.dataclass(kw_only=True)
class RecordedCell:
    """One combination of settings, and its numbers over all rounds.

    Attributes:
        statuses: how its runs ended, each word once.
        median: each number's median over the complete runs; a number that was not measured is absent.
        spread: each number's range over those runs as a share of the median.
        step_seconds: the times of the counted steps of all runs.
    """

    name: str
    statuses: list[str]
    reason: str
    rounds: int
    median: dict[str, float]
    spread: dict[str, float]
    step_seconds: list[float]


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """What comparison.json says, and the runs of its cells.

    `learnt` has the points of its learning curve: `rows` with a measured `metric`, or with `value`, `low` and `high` of
    a forecast.
    """

    name: str
    status: str
    created: str
    command: str
    varied: list[str]
    main_metric: str
    findings: list[str]
    learnt: list[dict[str, Any]]
    cells: list[RecordedCell]
    runs: list[Run]


def read_comparison(path: Path, name: str, *, alone: bool = True) -> Comparison:
    """Read a folder with comparison.json.

    Args:
        alone: whether the page shows nothing else. Otherwise cells elsewhere may have the same names, so each cell's
            name gets `name` in front of it.
    Raises:
        UserError: the file cannot be read, or is no comparison of this version.
    """
    file = path / COMPARISON
    record = mapping(read_json(file))
    if not isinstance(record.get("cells"), list):
        raise UserError(f"{file}: not the record of a comparison; name another folder")
    if record.get("schema") != SCHEMA:
        schema = one_line(repr(record.get("schema")), 60)
        raise UserError(
            f"{file}: its schema is {schema}, this version reads {SCHEMA}; use the version of accel-sft that wrote it"
        )
    cells, runs = [], []
    for each in filter(lambda cell: isinstance(cell, dict), record["cells"]):
        rounds = [run for run in _list(each.get("runs")) if isinstance(run, dict)]
        cell_name = str(each.get("name") or "unnamed")
        cell_name = cell_name if alone else f"{name}: {cell_name}"
        cells.append(_cell(cell_name, each, rounds))
        runs += [_run(path, name, cell_name, number, run) for number, run in enumerate(rounds, start=1)]
    return Comparison(
        name=name,
        status=str(record.get("status") or "complete"),
        created=str(record.get("created") or ""),
        command=str(record.get("command") or ""),
        varied=[str(key) for key in _list(record.get("varied"))],
        main_metric=str(record.get("main_metric") or "metric"),
        findings=[str(finding) for finding in _list(record.get("findings"))],
        learnt=_points(mapping(record.get("learning_curve"))),
        cells=cells,
        runs=runs,
    )


def _points(curve: dict[str, Any]) -> list[dict[str, Any]]:
    """The points of a learning curve, with forecasts for up to four times as many rows as were measured."""
    measured, ahead = ([_numbers(point) for point in _list(curve.get(key))] for key in ("measured", "forecast"))
    most = max((point.get("rows", 0) for point in measured), default=0)
    return [*measured, *(point for point in ahead if point.get("rows", 0) <= 4 * most)]


def _cell(name: str, cell: dict[str, Any], rounds: list[dict[str, Any]]) -> RecordedCell:
    statuses = list(dict.fromkeys(str(run.get("status") or "unknown") for run in rounds))
    reasons = [str(run["reason"]) for run in rounds if run.get("reason")]
    return RecordedCell(
        name=name,
        statuses=statuses or [str(cell.get("status") or "not run")],
        reason=str(cell.get("reason") or "") or (reasons[0] if reasons else "") or _disturbed(cell),
        rounds=len(rounds),
        median=_numbers(cell.get("median")),
        spread=_numbers(cell.get("spread")),
        step_seconds=[second for run in rounds for second in _list(run.get("step_seconds")) if is_number(second)],
    )


def _disturbed(cell: dict[str, Any]) -> str:
    """Which rounds were disturbed; the findings say by what."""
    return "; ".join(f"round {number} disturbed" for number in mapping(cell.get("disturbed")))


def _run(path: Path, comparison: str, cell: str, number: int, run: dict[str, Any]) -> Run:
    """Return the run in a round's folder or, if that has none, a run with what the comparison noted of it."""
    name = f"{cell}, round {run.get('round') or number}"
    folder = path / str(run.get("folder") or "")
    try:
        inside = folder.resolve().is_relative_to(path.resolve()) and folder.resolve() != path.resolve()
        found = read_run(folder, name) if inside else None
    except (UserError, ValueError, OSError):  # the last two: names that no file system takes
        found = None
    if found is None:
        noted = {key: run[key] for key in ("steps", "tokens_per_second", "mfu") if is_number(run.get(key))}
        nowhere = RunDir(path / "no-such-run")  # what the record names may lie elsewhere, or be no name at all
        found = Run(name=name, series=cell, folder=nowhere, status="unknown", result=noted)
        found.notes.append("its folder is not there: only what the comparison noted is shown")
    for key in ("tokens_per_second", "mfu", "peak_device_memory_gib", "peak_host_memory_gib"):
        if is_number(run.get(key)):  # the comparison's own numbers: its speed leaves out the discarded steps
            found.result[key] = run[key]
    found.series, found.status = cell, str(run.get("status") or found.status)
    found.reason = str(run.get("reason") or "") if found.status != "complete" else ""
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _numbers(values: Any) -> dict[str, float]:
    return {key: value for key, value in mapping(values).items() if is_number(value)}
