"""Reads and writes comparison.json: what a comparison was asked for and has measured so far, so that it can resume."""

import datetime
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import abandoned, json_safe, read_json, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.recordable import masked_words
from accel_sft.tools.compare.cells import Cell
from accel_sft.tools.compare.environment import environment
from accel_sft.tools.compare.measured import measure
from accel_sft.tools.compare.outcome import STATUSES
from accel_sft.tools.report.comparison import SCHEMA
from accel_sft.tools.report.runs import COMPARISON

_RECORD = {"task": str, "given": dict, "fingerprints": dict, "discard_steps": int, "cells": list, "environment": dict}
_ENTRY = {"name": str, "runs": list}
_RUN = {"round": int, "status": str, "reason": str, "folder": str, "log": str, "environment": dict}
"""Keys and types that a resume needs in a record, in each of its cells and in each run; the rest is made again."""


def open_record(folder: Path, wanted: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the record of the comparison in `folder`: a new record, or the one that an earlier start left there.

    Args:
        wanted: `task`, `given` (values by option), `fingerprints` (of files by option) and `discard_steps`, which must
            be the same as in an earlier record; `repeat`, `time_limit_minutes` and all other keys may change.
    Raises:
        UserError: the folder holds something else, or a comparison with other settings (one line for each difference).
    """
    path = folder / COMPARISON
    if not path.exists():
        if {*folder.iterdir()} - {*abandoned(folder)}:
            raise UserError(f"--output-dir {folder}: not empty, and no comparison; name another folder")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"environment": environment(), "cells": [_entry(cell) for cell in cells], "findings": []}
        return {"schema": SCHEMA, "created": now, "status": "running", **wanted, **made}
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the record of a comparison; name another --output-dir")
    if not _has(record, _RECORD) or not all(_has(entry, _ENTRY) for entry in record["cells"]):
        raise UserError(f"{path}: damaged, or changed by hand; put it back, or name another --output-dir")
    if different := _different(record, wanted):
        raise UserError(*different, f"--output-dir {folder}: give the settings it was started with, or another folder")
    before = {entry["name"]: entry["runs"] for entry in record["cells"]}
    entries = [
        {**_entry(cell), "runs": [*_still_there(folder, cell, before.get(cell.name, []), record["discard_steps"])]}
        for cell in cells
    ]
    return {**record, **wanted, "cells": entries, "status": "running"}


def _still_there(folder: Path, cell: Cell, runs: Sequence[Any], discard_steps: int) -> Iterator[dict[str, Any]]:
    """Yield the runs of a cell that need not be made again, with their numbers read again from their folders.

    A run whose folder was deleted is made again.
    """
    for run in runs:
        if not _has(run, _RUN) or run["status"] not in STATUSES:
            continue
        place = folder / "cells" / cell.folder / f"round-{run['round']}"
        if place.is_dir() and place == folder / run["folder"]:
            found = measure(RunDir(place), discard_steps)
            yield {**run, **found, "environment": {**run["environment"], **found["environment"]}}


def _has(value: Any, form: Mapping[str, type]) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), kind) for key, kind in form.items())


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace comparison.json; NaN becomes null."""
    write_atomically(folder / COMPARISON, json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n")


def _entry(cell: Cell) -> dict[str, Any]:
    words = masked_words(cell.words)
    return {"name": cell.name, "settings": cell.settings, "launch": cell.launch, "words": words, "runs": []}


def _different(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in ("task", "discard_steps"):
        if record[key] != wanted[key]:
            lines.append(f"{key.replace('_', '-')}: the comparison was started with {record[key]}, not {wanted[key]}")
    before, now = record["given"], wanted["given"]
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            told = [",".join(values) if values else "its default" for values in (before.get(name), now.get(name))]
            lines.append(f"{name}: the comparison was started with {told[0]}, not {told[1]}")
    before, now = record["fingerprints"], wanted["fingerprints"]
    return lines + [
        f"{name}: the file has changed since" for name in now if not lines and before.get(name) != now[name]
    ]
