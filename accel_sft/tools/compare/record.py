"""Reads and writes comparison.json: a comparison's settings and measurements so far, so that it can resume."""

import datetime
import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import abandoned, json_safe, mapping, read_json, write_atomically
from accel_sft.launch.machine_state import environment
from accel_sft.launch.recordable import masked_words
from accel_sft.tools.compare.settings import ComparedSetting
from accel_sft.tools.report.runs import COMPARISON, SCHEMA

RUNS = "runs"
"""The folder of a comparison's runs, below its own."""


def open_record(folder: Path, wanted: Mapping[str, Any], settings: Sequence[ComparedSetting]) -> dict[str, Any]:
    """Return the record of the comparison in `folder`: a new record, or the one that an earlier start left there.

    Args:
        wanted: the record's other keys. Of these `fingerprints` and `discard_steps` must be as in an earlier record, as
            must the settings; `repeat`, `time_limit_minutes` and all others may change.
    Raises:
        UserError: the folder holds something else, or a comparison of other settings.
    """
    path = folder / COMPARISON
    entries = [_entry(setting) for setting in settings]
    if not path.exists():
        if {*folder.iterdir()} - {*abandoned(folder)}:
            raise UserError(f"--output-dir {folder}: not empty, and no comparison; name another folder")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"environment": environment(), "settings": entries, "findings": []}
        return {"schema": SCHEMA, "created": now, "status": "running", **wanted, **made}
    record = mapping(read_json(path))
    if record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the record of a comparison; name another --output-dir")
    if _measured_alike(record) != _measured_alike({**wanted, "settings": entries}):
        raise UserError(
            f"--output-dir {folder}: a comparison of other settings or files; name another folder, or go on with: "
            f"{resuming(record, folder)}"
        )
    for entry, before in zip(entries, record["settings"], strict=True):
        entry["runs"] = [run for run in before["runs"] if (folder / run["folder"]).is_dir()]  # others are made again
    return {**record, **wanted, "settings": entries, "status": "running"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace comparison.json; NaN becomes null."""
    write_atomically(folder / COMPARISON, json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n")


def resuming(record: Mapping[str, Any], folder: Path) -> str:
    """Return the command that resumes the comparison: the user's command, with --output-dir if it had none."""
    words = shlex.split(record["command"])
    end = words.index("--") if "--" in words else len(words)
    if any(word.partition("=")[0] == "--output-dir" for word in words[:end]):
        return record["command"]
    return shlex.join([*words[:end], "--output-dir", str(folder), *words[end:]])


def _entry(setting: ComparedSetting) -> dict[str, Any]:
    words = masked_words(setting.words)
    about = {"values": setting.values, "launch": setting.launch, "fingerprint": setting.fingerprint}
    return {"name": setting.name, **about, "words": words, "runs": []}


def _measured_alike(record: Mapping[str, Any]) -> list[Any]:
    """The settings that an earlier start's measurements depend on."""
    keys = ("name", "words", "launch", "fingerprint")
    settings = [[setting.get(key) for key in keys] for setting in record["settings"]]
    return [record["fingerprints"], record["discard_steps"], settings]
