"""Reads the folders of runs and of comparisons for the page; notes say which files are missing or damaged."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import expanded, is_number, mapping, read_json, read_json_lines
from accel_sft.io.lock import is_locked
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line
from accel_sft.tracking.disturbed import disturbed_segments, sentences

COMPARISON = "comparison.json"
SCHEMA = 1
NUMBERS = {
    "median_step_seconds": "step time (s)",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_device": "tokens/s of each device",
    "mfu": "MFU (a share of 1)",
    "peak_device_memory_gib": "peak device memory, largest rank (GiB)",
    "mean_device_memory_gib": "mean device memory, largest rank (GiB)",
    "device_percent": "device use, mean of ranks (%)",
    "cpu_percent": "CPU use, all ranks (100% = one core)",
    "peak_host_memory_gib": "peak host memory, largest rank (GiB)",
    "host_memory_all_ranks_gib": "host memory, all ranks (GiB)",
    "batch_share": "share of a step that reading rows and making batches takes",
    "metric_after": "metric after training",
    "metric_low": "its 95% interval: from",
    "metric_high": "to",
    "eval_loss_after": "validation loss after training",
    "seconds": "launch to end (s)",
}
"""Numbers that `compare` measures of a run, with their titles. A setting has the median and the spread of each over its
runs."""
_FORM: dict[str, type] = {"status": str, "created": str, "command": str, "main_metric": str}
_FORM |= dict.fromkeys(("varied", "findings", "settings"), list)
_FORM_OF_SETTING: dict[str, type] = {"name": str, "status": str, "reason": str}
_FORM_OF_SETTING |= {"runs": list, "median": dict, "spread": dict, "disturbed": dict}
_FORM_OF_ROUND: dict[str, type] = {"round": int, "status": str, "reason": str, "folder": str}
"""Keys of a comparison's record that the page needs, and of each setting and run in it, with their types."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """The content of one run's files.

    Attributes:
        series: the key of the run's colour: for a run of a comparison the name of its setting, else `name`.
        status: complete, running, stopped, failed or, for a run of a comparison, how `compare` says that it ended.
        reason: why the run did not complete; empty if it did.
        started: when it was last started, in seconds since 1970; None if no file tells.
        record, result: the contents of run.json and of result.json; empty if there is none.
        steps, evaluations: the training lines and the other lines of metrics.jsonl, in the file's order.
        notes: files that are missing or unreadable.
    """

    name: str
    series: str
    folder: RunDir
    status: str
    reason: str = ""
    started: float | None = None
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    result: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    evaluations: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def task(self) -> str:
        return str(self.record.get("task") or self.result.get("task") or "")

    @property
    def last_step(self) -> int | None:
        if is_number(self.result.get("steps")):
            return self.result["steps"]
        return self.steps[-1]["step"] if self.steps else None

    @property
    def disturbed(self) -> list[str]:
        """The steps in which the run was disturbed, and by what."""
        return [one_line(sentence, 200) for sentence in sentences(disturbed_segments(self.steps))]

    def section(self, *keys: str) -> dict[str, Any]:
        """A mapping inside result.json; empty if it is not there."""
        inner = self.result
        for key in keys:
            inner = mapping(inner.get(key))
        return inner


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """A comparison's record, its settings by their names on the page, and their runs.

    Attributes:
        learnt: the points of its learning curve: `rows` with a measured `metric`, or with `value`, `low` and `high` of
            a forecast.
    """

    name: str
    record: dict[str, Any]
    settings: list[dict[str, Any]]
    learnt: list[dict[str, float]]
    runs: list[Run]


def read_run(path: Path, name: str) -> Run:
    """Read the folder of one run; UserError if it is none."""
    if not path.is_dir():
        raise UserError(f"RUN {path}: {'not a folder' if path.exists() else 'there is no such folder'}; name a run's")
    folder = RunDir(path)
    run = Run(name=name, series=name, folder=folder, status="unknown")
    run.record, run.result = _read(run, folder.record), _read(run, folder.result)
    has_steps = folder.metrics.exists() and not run.record  # run.json is damaged, or not there
    is_evaluation = {"task", "after"} <= run.result.keys()  # `evaluate --output-dir` writes no record
    if not (has_steps or is_evaluation or folder.is_run()):
        fix = f"name those in it: {folder}/*" if any(path.glob("*/run.json")) else "name another folder"
        raise UserError(f"RUN {folder}: it has neither {folder.record.name} nor {COMPARISON}; {fix}")
    if not folder.record.exists():
        alone = is_evaluation and not has_steps
        run.notes.append("an evaluation: no settings, no steps" if alone else "run.json is missing: settings unknown")
    _read_metrics(run)
    newest = folder.record if folder.record.exists() else folder.result
    run.started = newest.stat().st_mtime if newest.exists() else None
    run.status, run.reason = _status(run)
    return run


def _read(run: Run, path: Path) -> dict[str, Any]:
    """A JSON file of the run; empty if it is missing or damaged (the notes then say so)."""
    try:
        return mapping(read_json(path)) if path.exists() else {}
    except UserError:
        what = "half-written or damaged" if path.is_file() else "no regular file"
        run.notes.append(f"{path.name} cannot be read: it is {what}")
        return {}


def _read_metrics(run: Run) -> None:
    path = run.folder.metrics
    if not path.exists():
        if run.record:
            run.notes.append("metrics.jsonl is not there: no step was recorded")
        return
    try:
        rows, unreadable = read_json_lines(path)
    except OSError as error:
        run.notes.append(f"metrics.jsonl cannot be read: {error.strerror}")
        return
    for row in rows:
        if is_number(row.get("step")):
            (run.steps if "loss" in row else run.evaluations).append(row)
        else:
            unreadable += 1
    if unreadable:
        run.notes.append(f"without {unreadable} of its lines in metrics.jsonl, which cannot be read")


def _status(run: Run) -> tuple[str, str]:
    status = run.result.get("status")
    reason = one_line(str(run.result.get("error") or ""), 600)
    if status == "interrupted":
        return "stopped", reason or "interrupted"
    if status in ("complete", "failed"):
        return status, reason
    if is_locked(run.folder.path):
        return "running", ""
    return "stopped", "no end is recorded, and no process here works in its folder: it was killed"


def named(paths: list[str]) -> dict[str, Path]:
    """A name for each folder: its own, or its path as it was given if two have the same name."""
    folders = list(dict.fromkeys(expanded(path, "RUN") for path in paths))
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def read_comparison(path: Path, name: str, *, alone: bool = True) -> Comparison:
    """Read a folder with comparison.json; UserError if it is no comparison of this version, or damaged.

    Unless the page shows it `alone`, its settings may have the names of others: each gets `name` in front of it.
    """
    file = path / COMPARISON
    record = mapping(read_json(file))
    if record.get("schema") != SCHEMA:
        schema = one_line(repr(record.get("schema")), 60)
        problem = f"its schema is {schema}, this version reads {SCHEMA}"
        raise UserError(f"{file}: {problem}; use the version of accel-sft that wrote it")
    settings: list[dict[str, Any]] = []
    runs: list[Run] = []
    entries: list[Any] = record["settings"] if _has(record, _FORM) else [None]
    for setting in entries:
        if not _has(setting, _FORM_OF_SETTING) or not all(_has(run, _FORM_OF_ROUND) for run in setting["runs"]):
            raise UserError(f"{file}: damaged; name another folder")
        shown_name = setting["name"] if alone else f"{name}: {setting['name']}"
        numbers = {key: _numbers(setting[key]) for key in ("median", "spread")}
        settings.append({**setting, **numbers, "name": shown_name})
        runs += [_round(path, shown_name, run) for run in setting["runs"]]
    learnt = _points(mapping(record.get("learning_curve")))
    return Comparison(name=name, record=record, settings=settings, learnt=learnt, runs=runs)


def _has(value: Any, form: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in form.items())


def _points(curve: dict[str, Any]) -> list[dict[str, float]]:
    """The points of a learning curve, with forecasts for up to four times as many rows as were measured."""
    lists = [value if isinstance(value := curve.get(key), list) else [] for key in ("measured", "forecast")]
    measured, ahead = ([_numbers(point) for point in points] for points in lists)
    most = max((point.get("rows", 0) for point in measured), default=0)
    return [*measured, *(point for point in ahead if point.get("rows", 0) <= 4 * most)]


def _round(path: Path, setting: str, noted: dict[str, Any]) -> Run:
    """Return the run in a round's folder or, if that has none, a run with what the comparison noted of it."""
    name = f"{setting}, round {noted['round']}"
    try:
        folder = (path / noted["folder"]).resolve()
        if path.resolve() not in folder.parents:
            raise UserError("a comparison's runs are in its folder")
        run = read_run(folder, name)
    except (UserError, ValueError, OSError):  # the last two: names that no file system takes
        run = Run(name=name, series=setting, folder=RunDir(path / "no-such-run"), status="unknown")
        run.notes.append("its folder is not there: only what the comparison noted is shown")
        run.result = {"steps": noted["steps"]} if is_number(noted.get("steps")) else {}
    for key in ("tokens_per_second", "mfu", "peak_device_memory_gib", "peak_host_memory_gib"):
        if is_number(noted.get(key)):  # the comparison's own numbers: its speed leaves out the discarded steps
            run.result[key] = noted[key]
    run.series, run.status = setting, noted["status"]
    run.reason = noted["reason"] if run.status != "complete" else ""
    return run


def _numbers(values: Any) -> dict[str, float]:
    return {key: value for key, value in mapping(values).items() if is_number(value)}
