"""Reads and writes comparison.json: what a comparison was asked for and has measured so far, so that it can resume."""

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import abandoned, json_safe, mapping, read_json, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.recordable import masked_words
from accel_sft.launch.this_machine import environment
from accel_sft.tools.compare.measured import measure
from accel_sft.tools.compare.settings import ComparedSetting
from accel_sft.tools.report.runs import COMPARISON, SCHEMA

RUNS = "runs"
"""The folder of a comparison's runs, below its own."""


def open_record(folder: Path, wanted: Mapping[str, Any], settings: Sequence[ComparedSetting]) -> dict[str, Any]:
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
        made = {"environment": environment(), "settings": [_entry(setting) for setting in settings], "findings": []}
        return {"schema": SCHEMA, "created": now, "status": "running", **wanted, **made}
    record = mapping(read_json(path))
    if record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the record of a comparison; name another --output-dir")
    if different := _different(record, wanted):
        raise UserError(*different, f"--output-dir {folder}: give the settings it was started with, or another folder")
    entries = [_entry(setting) for setting in settings]
    for entry, before in zip(entries, record["settings"], strict=True):
        for run in before["runs"]:
            run_dir = RunDir(folder / run["folder"])
            if run_dir.path.is_dir():  # others are made again
                measured = measure(run_dir, wanted["discard_steps"])
                environment_of_run = {**run["environment"], **measured["environment"]}
                entry["runs"].append({**run, **measured, "environment": environment_of_run})
    return {**record, **wanted, "settings": entries, "status": "running"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace comparison.json; NaN becomes null."""
    write_atomically(folder / COMPARISON, json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n")


def _entry(setting: ComparedSetting) -> dict[str, Any]:
    words = masked_words(setting.words)
    return {"name": setting.name, "values": setting.values, "launch": setting.launch, "words": words, "runs": []}


def _different(record: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    lines = []
    for key in ("task", "discard_steps"):
        if record[key] != wanted[key]:
            lines.append(f"{key.replace('_', '-')}: the comparison was started with {record[key]}, not {wanted[key]}")
    before, now = record["given"], wanted["given"]
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            was, given = (",".join(values) if values else "its default" for values in (before.get(name), now.get(name)))
            lines.append(f"{name}: the comparison was started with {was}, not {given}")
    before, now = record["fingerprints"], wanted["fingerprints"]
    return lines or [f"{name}: the file has changed since" for name in now if before.get(name) != now[name]]
