"""Reads a run's folder for the page; notes say which files are missing or damaged."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import expanded, mapping, read_json, read_text
from accel_sft.io.lock import is_locked
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line
from accel_sft.tracking.disturbed import sentences, stretches
from accel_sft.tracking.run_report import is_number

COMPARISON = "comparison.json"


@dataclasses.dataclass(kw_only=True)
class Run:
    """What the files of one run say.

    Attributes:
        name: the run's name on the page, made of its folder's name.
        series: the key of the run's colour: for a run of a comparison the name of its cell, else `name`.
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
        return [one_line(each, 200) for each in sentences(stretches(self.steps))]

    def section(self, *keys: str) -> dict[str, Any]:
        """A mapping inside result.json; empty if it is not there."""
        found = self.result
        for key in keys:
            found = mapping(found.get(key))
        return found


def read_run(path: Path, name: str) -> Run:
    """Read the folder of one run.

    Raises:
        UserError: the folder is not a run's; the message says what it is instead.
    """
    folder = RunDir(path)
    _refuse_others(folder)
    run = Run(name=name, series=name, folder=folder, status="unknown")
    run.record, run.result = (_read(run, path) for path in (folder.record, folder.result))
    if not folder.record.exists():
        run.notes.append("run.json is not there: settings are not known")
    _read_metrics(run)
    run.started = _started(folder)
    run.status, run.reason = _status(run)
    return run


def _refuse_others(folder: RunDir) -> None:
    path = folder.path
    if not path.is_dir():
        raise UserError(f"RUN {path}: {'not a folder' if path.exists() else 'there is no such folder'}; name a run's")
    if folder.metrics.exists() and _damaged(folder.record):
        return
    if folder.is_run() or (folder.metrics.exists() and not folder.record.exists()):
        return
    # `evaluate --output-dir` writes no record
    if folder.result.exists() and {"task", "after"} <= mapping(read_json(folder.result)).keys():
        return
    inside = sorted(each.parent for each in path.glob(f"*/{folder.record.name}"))
    if inside:
        found = (
            f"{len(inside)} are in it; name them: {path}/*" if len(inside) > 1 else f"name the one in it: {inside[0]}"
        )
        raise UserError(f"RUN {path}: not a run's folder itself, but {found}")
    raise UserError(f"RUN {path}: not a run's folder: it has neither {folder.record.name} nor {COMPARISON}")


def _damaged(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        read_json(path)
    except UserError:
        return True
    return False


def _read(run: Run, path: Path) -> dict[str, Any]:
    """A JSON file of the run; empty if it is missing or damaged (the notes then say so)."""
    try:
        return mapping(read_json(path)) if path.exists() else {}
    except UserError:
        what = "half-written or damaged" if path.is_file() else "no regular file"
        run.notes.append(f"{path.name} cannot be read: it is {what}")
        return {}


def _read_metrics(run: Run) -> None:
    path, unreadable = run.folder.metrics, 0
    if not path.exists():
        if run.record:
            run.notes.append("metrics.jsonl is not there: no step was recorded")
        return
    try:
        text = read_text(path, "replace")
    except OSError as error:
        run.notes.append(f"metrics.jsonl cannot be read: {error.strerror}")
        return
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not is_number(row.get("step")):
            unreadable += 1
            continue
        (run.steps if "loss" in row else run.evaluations).append(row)
    if unreadable:
        run.notes.append(f"without {unreadable} of its lines in metrics.jsonl, which cannot be read")


def _started(folder: RunDir) -> float | None:
    """When the run started, in seconds since 1970.

    The names of TensorBoard's files hold the time of their creation; without them, the time of run.json counts.
    """
    seconds = [path.name.split(".")[3] for path in folder.path.glob("events.out.tfevents.*.*")]
    found = [int(each) for each in seconds if each.isdecimal()]
    if found:
        return float(min(found))
    return next((path.stat().st_mtime for path in (folder.record, folder.result) if path.exists()), None)


def _status(run: Run) -> tuple[str, str]:
    said = run.result.get("status")
    reason = one_line(str(run.result.get("error") or ""), 600)
    if said == "interrupted":
        return "stopped", reason or "interrupted"
    if said in ("complete", "failed"):
        return said, reason
    if is_locked(run.folder.path):
        return "running", ""
    files = [path for path in (run.folder.metrics, run.folder.result) if path.exists()]
    when = max((path.stat().st_mtime for path in files), default=None)
    written = (
        "" if when is None else f"; its last line was written {time.strftime('%Y-%m-%d %H:%M', time.localtime(when))}"
    )
    return "stopped", f"no end is recorded, and no process here works in its folder: it was killed{written}"


def named(paths: list[str]) -> dict[str, Path]:
    """A name for each folder: its own, or its path as it was given if two have the same name."""
    folders = list(dict.fromkeys(expanded(path, "RUN") for path in paths))
    names = [folder.resolve().name for folder in folders]
    return {
        name if names.count(name) == 1 else str(folder): folder for name, folder in zip(names, folders, strict=True)
    }
