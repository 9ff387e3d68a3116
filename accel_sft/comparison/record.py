"""comparison.json: what a comparison was asked for and has measured so far, by which it goes on."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.comparison.cells import Cell
from accel_sft.comparison.environment import environment
from accel_sft.io.files import abandoned, json_safe, read_json, write_atomically
from accel_sft.launch.recordable import masked_words

SCHEMA = 1
FILE = "comparison.json"


def open_record(folder: Path, wanted: Mapping[str, Any], cells: Sequence[Cell]) -> dict[str, Any]:
    """The record of the comparison in `folder`, new, or the one that was interrupted there.

    Args:
        wanted: `task`, `given` (values by option), `fingerprints` (of files by option), `discard_steps`,
            which must be the ones of before; `repeat`, `time_limit_minutes`, `command` and the like, which may change.
    Raises:
        UserError: the folder has something else, or a comparison of other settings, one line each.
    """
    path = folder / FILE
    if not path.exists():
        if {*folder.iterdir()} - {*abandoned(folder)}:
            raise UserError(f"--output-dir {folder}: not empty, and no comparison; name another folder")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"environment": environment(), "cells": [_entry(cell) for cell in cells], "findings": []}
        return {"schema": SCHEMA, "created": now, "status": "running", **wanted, **made}
    record = read_json(path)
    if not isinstance(record, dict) or record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the record of a comparison; name another --output-dir")
    if different := _different(record, wanted):
        raise UserError(*different, f"--output-dir {folder}: give the settings it was started with, or another folder")
    for entry in record["cells"]:  # whoever deletes a run's folder wants it again
        entry["runs"] = [run for run in entry["runs"] if (folder / run["folder"]).is_dir()]
    return {**record, **wanted, "status": "running"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace comparison.json; NaN becomes null."""
    write_atomically(folder / FILE, json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n")


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
