"""Reads the folders of runs and of comparisons for the page; notes say which files are missing or damaged."""

import dataclasses
import re
import time
from collections import defaultdict
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
_FORM_OF_ROUND: dict[str, type] = {"round": int, "status": str, "reason": str, "folder": str, "step_seconds": list}
"""Keys of a comparison's record that the page needs, and of each setting and run in it, with their types."""
_TAG = re.compile(r"system/rank(\d+)/(\w+)")
Readings = dict[tuple[str, int], dict[int, float]]
"""Readings by step, of each (field of `system.SYSTEM_FIELDS`, rank)."""


@dataclasses.dataclass(kw_only=True)
class Run:
    """What the files of one run say.

    Attributes:
        name: the run's name on the page, made of its folder's name.
        series: the key of the run's colour: for a run of a comparison the name of its setting, else `name`.
        status: complete, running, stopped, failed or, for a run of a comparison, how `compare` says that it ended.
        reason: why it did not complete, in a sentence; else empty.
        started: seconds since 1970; None if no file tells.
        record, result: the contents of run.json and of result.json; empty if there is none.
        steps, evaluations: the training lines and the other lines of metrics.jsonl, in the file's order.
        notes: what is missing or could not be read.
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
    """A comparison's record, and the runs of its settings.

    Attributes:
        settings: of each setting `name`, `statuses` (how its runs ended, each word once), `reason`, number of `rounds`,
            `median` and `spread` of each number that was measured, and `step_seconds` of all runs.
        learnt: the points of its learning curve: `rows` with a measured `metric`, or with `value`, `low` and `high` of
            a forecast.
    """

    name: str
    record: dict[str, Any]
    settings: list[dict[str, Any]]
    learnt: list[dict[str, float]]
    runs: list[Run]


def read_run(path: Path, name: str) -> Run:
    """Read the folder of one run.

    Raises:
        UserError: the folder is not a run's; the message says what it is instead.
    """
    if not path.is_dir():
        raise UserError(f"RUN {path}: {'not a folder' if path.exists() else 'there is no such folder'}; name a run's")
    folder = RunDir(path)
    run = Run(name=name, series=name, folder=folder, status="unknown")
    run.record, run.result = _read(run, folder.record), _read(run, folder.result)
    has_steps = folder.metrics.exists() and not run.record  # run.json is damaged, or not there
    is_evaluation = {"task", "after"} <= run.result.keys()  # `evaluate --output-dir` writes no record
    if not (has_steps or is_evaluation or folder.is_run()):
        raise UserError(_no_run(folder))
    if not folder.record.exists():
        alone = is_evaluation and not has_steps
        run.notes.append("an evaluation: no settings, no steps" if alone else "run.json is missing: settings unknown")
    _read_metrics(run)
    run.started = _started(folder)
    run.status, run.reason = _status(run)
    return run


def _no_run(folder: RunDir) -> str:
    inside = sorted(record.parent for record in folder.path.glob(f"*/{folder.record.name}"))
    if not inside:
        return f"RUN {folder}: not a run's folder: it has neither {folder.record.name} nor {COMPARISON}"
    several = f"{len(inside)} are in it; name them: {folder}/*"
    others = several if len(inside) > 1 else f"name the one in it: {inside[0]}"
    return f"RUN {folder}: not a run's folder itself, but {others}"


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


def system_readings(run: Run) -> Readings:
    """Return each rank's CPU, memory and GPU use from the run's TensorBoard files, as metrics.jsonl does not have them,
    without what a resumed run measured anew; empty if there are no event files.

    A file that is damaged is read as far as possible, and the run's notes say so.
    """
    paths = sorted(path for path in run.folder.path.glob("events.out.tfevents.*") if path.is_file())
    if not paths:
        return {}
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    readings: Readings = defaultdict(dict)
    for path in paths:
        try:
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                    _drop_from(readings, event.step)
                for value in event.summary.value:
                    if tag := _TAG.fullmatch(value.tag):
                        readings[tag[2], int(tag[1])][event.step] = value.simple_value
        except (OSError, DecodeError, RuntimeError) as error:
            run.notes.append(f"{path.name} is read as far as it goes: {type(error).__name__}")
    return dict(readings)


def _drop_from(readings: Readings, step: int) -> None:
    """Drop the readings from a step on: a session that starts there replaces them."""
    for curve in readings.values():
        for later in [number for number in curve if number >= step]:
            del curve[later]


def _started(folder: RunDir) -> float | None:
    """When the run started, in seconds since 1970.

    The names of TensorBoard's files hold the time of their creation; without them, the time of run.json counts.
    """
    parts = [path.name.split(".")[3] for path in folder.path.glob("events.out.tfevents.*.*")]
    if seconds := [int(part) for part in parts if part.isdecimal()]:
        return float(min(seconds))
    return next((path.stat().st_mtime for path in (folder.record, folder.result) if path.exists()), None)


def _status(run: Run) -> tuple[str, str]:
    status = run.result.get("status")
    reason = one_line(str(run.result.get("error") or ""), 600)
    if status == "interrupted":
        return "stopped", reason or "interrupted"
    if status in ("complete", "failed"):
        return status, reason
    if is_locked(run.folder.path):
        return "running", ""
    times = [path.stat().st_mtime for path in (run.folder.metrics, run.folder.result) if path.exists()]
    last = time.strftime("%Y-%m-%d %H:%M", time.localtime(max(times))) if times else ""
    written = f"; its last line was written {last}" if last else ""
    return "stopped", f"no end is recorded, and no process here works in its folder: it was killed{written}"


def named(paths: list[str]) -> dict[str, Path]:
    """A name for each folder: its own, or its path as it was given if two have the same name."""
    folders = list(dict.fromkeys(expanded(path, "RUN") for path in paths))
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }


def read_comparison(path: Path, name: str, *, alone: bool = True) -> Comparison:
    """Read a folder with comparison.json.

    Args:
        alone: whether the page shows nothing else. Otherwise settings elsewhere may have the same names, so each
            setting's name gets `name` in front of it.
    Raises:
        UserError: the file cannot be read, is no comparison of this version, or is damaged.
    """
    file = path / COMPARISON
    record = mapping(read_json(file))
    if record.get("schema") != SCHEMA:
        schema = one_line(repr(record.get("schema")), 60)
        problem = f"its schema is {schema}, this version reads {SCHEMA}"
        raise UserError(f"{file}: {problem}; use the version of accel-sft that wrote it")
    if not _has(record, _FORM) or not all(_has(setting, _FORM_OF_SETTING) for setting in record["settings"]):
        raise UserError(f"{file}: damaged; name another folder")
    settings, runs = [], []
    for setting in record["settings"]:
        if not all(_has(run, _FORM_OF_ROUND) for run in setting["runs"]):
            raise UserError(f"{file}: damaged; name another folder")
        shown_name = setting["name"] if alone else f"{name}: {setting['name']}"
        settings.append(_setting(shown_name, setting))
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


def _setting(name: str, setting: dict[str, Any]) -> dict[str, Any]:
    runs = setting["runs"]
    reasons = [setting["reason"], *(run["reason"] for run in runs)]
    disturbed = "; ".join(f"round {number} disturbed" for number in setting["disturbed"])  # the findings say by what
    return {
        "name": name,
        "statuses": list(dict.fromkeys(run["status"] for run in runs)) or [setting["status"]],
        "reason": next(filter(None, reasons), disturbed),
        "rounds": len(runs),
        "median": _numbers(setting["median"]),
        "spread": _numbers(setting["spread"]),
        "step_seconds": [seconds for run in runs for seconds in run["step_seconds"] if is_number(seconds)],
    }


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
