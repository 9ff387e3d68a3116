"""Reads the folders of runs and of comparisons for the page; notes say which files are missing or damaged."""

import dataclasses
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
"""Numbers that `compare` measures of a run, with their titles. A setting has each number's median and spread over its
runs."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """The content of one run's files.

    Attributes:
        series: the key of the run's colour: for a run of a comparison, the name of the run's setting; else `name`.
        status: complete, running, stopped, failed or, for a run of a comparison, how `compare` says that it ended.
        reason: why the run did not complete; empty if it did.
        started: when it was last started, in seconds since 1970; None if no file says.
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
        """The steps in which the run was disturbed, and the cause."""
        return [one_line(sentence, 200) for sentence in sentences(disturbed_segments(self.steps))]

    def section(self, *keys: str) -> dict[str, Any]:
        """The mapping under these keys in result.json; empty if there is none."""
        inner = self.result
        for key in keys:
            inner = mapping(inner.get(key))
        return inner


@dataclasses.dataclass(kw_only=True)
class Comparison:
    """A comparison's record, its settings by their names on the page, and their runs.

    Attributes:
        learnt: the points of its learning curve: `rows` with a measured `metric`, or with `value`, `low` and `high` of
            a forecast, which goes up to four times as many rows as were measured.
    """

    name: str
    record: dict[str, Any]
    settings: list[dict[str, Any]]
    learnt: list[dict[str, float]]
    runs: list[Run]


def read_run(path: Path, name: str) -> Run:
    """Read the folder of one run; UserError if it is not a run's folder."""
    if not path.is_dir():
        raise UserError(f"RUN {path}: {'not a folder' if path.exists() else 'no such folder'}; name a run's folder")
    folder = RunDir(path)
    run = Run(name=name, series=name, folder=folder, status="unknown")
    run.record, run.result = _read(run, folder.record), _read(run, folder.result)
    has_steps = folder.metrics.exists() and not run.record  # run.json is damaged, or not there
    is_evaluation = {"task", "after"} <= run.result.keys()  # `evaluate --output-dir` writes no record
    if not (has_steps or is_evaluation or folder.is_run()):
        fix = f"name the runs in it: {folder}/*" if any(path.glob("*/run.json")) else "name another folder"
        raise UserError(f"RUN {folder}: it has neither {folder.record.name} nor {COMPARISON}; {fix}")
    if not folder.record.exists():
        only_scores = is_evaluation and not has_steps
        note = "an evaluation has no settings and no steps" if only_scores else "run.json is missing: settings unknown"
        run.notes.append(note)
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
        what = "half-written or damaged" if path.is_file() else "not a regular file"
        run.notes.append(f"{path.name} cannot be read: it is {what}")
        return {}


def _read_metrics(run: Run) -> None:
    if run.folder.metrics.exists():
        for row in read_lines(run, run.folder.metrics):
            if is_number(row.get("step")):
                (run.steps if "loss" in row else run.evaluations).append(row)
    elif run.record:
        run.notes.append("metrics.jsonl is missing: no step was recorded")


def read_lines(run: Run, path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a run's file, one on each line; the notes say if some cannot be read."""
    try:
        rows, unreadable = read_json_lines(path)
    except OSError as error:
        run.notes.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if unreadable:
        run.notes.append(f"{path.name} has lines that cannot be read: {unreadable}")
    return rows


def _status(run: Run) -> tuple[str, str]:
    status = run.result.get("status")
    reason = one_line(str(run.result.get("error") or ""), 600)
    if status == "interrupted":
        return "stopped", reason or "interrupted"
    if status in ("complete", "failed"):
        return status, reason
    if is_locked(run.folder.path):
        return "running", ""
    return "stopped", "no end is recorded, and no process on this machine works in its folder: it was killed"


def named(paths: list[str]) -> dict[str, Path]:
    """A name for each folder: the folder's own name, or the path as given if two folders have the same name."""
    folders = list(dict.fromkeys(expanded(path, "RUN") for path in paths))
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def read_comparison(path: Path, name: str, *, alone: bool = True) -> Comparison:
    """Read a folder with comparison.json; UserError if it is no comparison of this version.

    Unless the comparison is `alone` on the page, `name` precedes its settings' names: other comparisons may share them.
    """
    file = path / COMPARISON
    record = mapping(read_json(file))
    if record.get("schema") != SCHEMA:
        schema = one_line(repr(record.get("schema")), 60)
        problem = f"its schema is {schema}, but this version reads {SCHEMA}"
        raise UserError(f"{file}: {problem}; use the version of accel-sft that wrote it")
    try:
        settings = record["settings"]
        if not alone:
            settings = [{**setting, "name": f"{name}: {setting['name']}"} for setting in settings]
        runs = [_round(path, setting["name"], run) for setting in settings for run in setting["runs"]]
        curve = record.get("learning_curve") or {"measured": [], "forecast": []}
        most = max((point["rows"] for point in curve["measured"]), default=0)
        learnt = [*curve["measured"], *(point for point in curve["forecast"] if point["rows"] <= 4 * most)]
    except (KeyError, TypeError):
        raise UserError(f"{file}: damaged; name another folder") from None
    return Comparison(name=name, record=record, settings=settings, learnt=learnt, runs=runs)


def _round(path: Path, setting: str, noted: dict[str, Any]) -> Run:
    """Return the run in a round's folder or, if the folder has no run, a run made from the comparison's record."""
    name = f"{setting}, round {noted['round']}"
    try:
        run = read_run(path / noted["folder"], name)
    except UserError:
        run = Run(name=name, series=setting, folder=RunDir(path / noted["folder"]), status="unknown")
        run.notes.append("its folder is missing: only what the comparison recorded is shown")
        run.result = {"steps": noted["steps"]} if is_number(noted.get("steps")) else {}
    for key in ("tokens_per_second", "mfu", "peak_device_memory_gib", "peak_host_memory_gib"):
        if is_number(noted.get(key)):  # the comparison's own numbers: its speed leaves out the discarded steps
            run.result[key] = noted[key]
    run.series, run.status = setting, noted["status"]
    run.reason = noted["reason"] if run.status != "complete" else ""
    return run
