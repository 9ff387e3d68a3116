"""Runs the settings round by round, and keeps comparison.json, with which an interrupted comparison resumes."""

import datetime
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

from accel_sft.api.errors import UserError
from accel_sft.io.files import abandoned, json_safe, mapping, read_json, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import columns, terminal, wrapped
from accel_sft.io.text import printable, shown
from accel_sft.launch.child import end_all, launch, outcome, signals_interrupt
from accel_sft.launch.machine_state import environment
from accel_sft.launch.recordable import masked_words
from accel_sft.tools.compare.findings import findings, paired_settings
from accel_sft.tools.compare.learning_curve import learnt
from accel_sft.tools.compare.measured import completed, last_step, measure, summarise
from accel_sft.tools.compare.settings import ComparedSetting
from accel_sft.tools.compare.tables import as_csv, terminal_table
from accel_sft.tools.report.runs import COMPARISON, SCHEMA


def open_record(folder: Path, wanted: Mapping[str, Any], settings: Sequence[ComparedSetting]) -> dict[str, Any]:
    """Return the record of the comparison in `folder`; make a new record if the folder is empty. `wanted` has what the
    command asks for, such as `repeat`: these values replace those that an earlier start recorded."""
    path = folder / COMPARISON
    entries = [_entry(setting) for setting in settings]
    if not path.exists():
        if {*folder.iterdir()} - {*abandoned(folder)}:
            raise UserError(f"--output-dir {folder}: not empty, and without a comparison; name another folder")
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        made = {"environment": environment(), "settings": entries, "findings": []}
        return {"schema": SCHEMA, "created": now, "status": "running", **wanted, **made}
    record = mapping(read_json(path))
    if record.get("schema") != SCHEMA:
        raise UserError(f"{path}: not the record of a comparison; name another --output-dir")
    try:
        if _measured_alike(record) != _measured_alike({**wanted, "settings": entries}):
            advice = f"name another folder, or repeat the command in {COMPARISON} with this option"
            raise UserError(f"--output-dir {folder}: has a comparison of other settings or files; {advice}")
        for entry, before in zip(entries, record["settings"], strict=True):
            # a run whose folder was removed is made again
            entry["runs"] = [run for run in before["runs"] if (folder / run["folder"]).is_dir()]
    except (LookupError, TypeError, AttributeError):
        raise UserError(f"{path}: damaged; name another --output-dir") from None
    return {**record, **wanted, "settings": entries, "status": "running"}


def write_record(folder: Path, record: Mapping[str, Any]) -> None:
    """Replace comparison.json; NaN becomes null."""
    write_atomically(folder / COMPARISON, json.dumps(json_safe(record), indent=1, ensure_ascii=False) + "\n")


def _entry(setting: ComparedSetting) -> dict[str, Any]:
    words = masked_words(setting.words)
    about = {"values": setting.values, "launch": setting.launch, "fingerprint": setting.fingerprint}
    return {"name": setting.name, **about, "words": words, "runs": []}


def _measured_alike(record: Mapping[str, Any]) -> list[Any]:
    """The parts of a record that must stay the same for measurements of an earlier start to count."""
    keys = ("name", "words", "launch", "fingerprint")
    settings = [[setting.get(key) for key in keys] for setting in record["settings"]]
    return [record["fingerprints"], record["discard_steps"], settings]


def run(record: dict[str, Any], folder: Path, settings: Sequence[ComparedSetting], *, keep_weights: bool) -> None:
    """Make the runs that `record` does not have yet, and print the table. A signal ends the current launch, and raises
    `Interrupted`; finished runs are kept."""
    console = Console(file=terminal(), highlight=False, width=columns())
    _update(record, folder)  # so that the comparison can resume even if it is killed in its first run
    try:
        with signals_interrupt(), console.status("", refresh_per_second=2) as status:
            for number, setting, entry in _due(record, settings):
                done, most = sum(len(entry["runs"]) for entry in record["settings"]), record["repeat"] * len(settings)
                title = f"{done + 1} of {most}: round {number}, {setting.name}"
                measured = _run_once(record, folder, setting, number, status, title)
                entry["runs"].append(measured)
                run_dir = RunDir(folder / measured["folder"])
                weights = run_dir.final, run_dir.final_plain, run_dir.best, run_dir.base, run_dir.checkpoints
                for path in () if keep_weights else weights:
                    shutil.rmtree(path, ignore_errors=True)
                _update(record, folder)
                _print_run(console, title, measured)
    except KeyboardInterrupt as interruption:
        record["status"] = "interrupted"
        _update(record, folder)
        interruption.args = (f"{interruption}; to resume, repeat the command with --output-dir {folder}",)
        raise interruption from None
    record["status"] = "complete"
    _update(record, folder)
    console.print(terminal_table(record))
    for line in record["findings"]:
        print(wrapped(printable(f"- {line}"), 2), file=terminal())


def _due(
    record: dict[str, Any], settings: Sequence[ComparedSetting]
) -> Iterator[tuple[int, ComparedSetting, dict[str, Any]]]:
    """Yield round, setting and record entry of each run still to be made, except for settings whose runs all failed."""
    for number in range(1, record["repeat"] + 1):
        for setting, entry in zip(settings, record["settings"], strict=True):
            failed = entry["runs"] and not completed(entry)
            if not failed and number not in [run["round"] for run in entry["runs"]]:
                yield number, setting, entry


def _run_once(
    record: dict[str, Any], folder: Path, setting: ComparedSetting, number: int, status: Status, title: str
) -> dict[str, Any]:
    """Run a setting once and return the run's record; first end an earlier attempt and remove its files."""
    place = folder / "runs" / setting.folder
    run_dir, log = RunDir(place / f"round-{number}"), place / f"round-{number}.log"
    end_all(run_dir.path)
    shutil.rmtree(run_dir.path, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)

    def look() -> None:
        line = f"{title}, step {last_step(run_dir)}, {time.monotonic() - began:.0f} s"
        status.update(Text(printable(line), no_wrap=True, overflow="ellipsis"))

    began = time.monotonic()
    started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    limit = record["time_limit_minutes"] * 60
    look()
    try:
        ended = launch(setting.command(run_dir.path), setting.environment, run_dir.path, log, limit, look)
    except BaseException:
        shutil.rmtree(run_dir.path, ignore_errors=True)
        raise
    word, reason = outcome(ended, run_dir, log, limit)
    run_dir.path.mkdir(exist_ok=True)  # the folder marks the run as made, even if the launch failed before it made one
    return {
        "round": number,
        "status": word,
        "reason": reason,
        "folder": str(run_dir.path.relative_to(folder)),
        "log": str(log.relative_to(folder)),
        "command": setting.shown_command(run_dir.path),
        "started": started,
        "seconds": ended.seconds,
        **measure(run_dir, record["discard_steps"]),
    }


def _update(record: dict[str, Any], folder: Path) -> None:
    summarise(record, folder)
    record["paired"] = paired_settings(record, folder)
    record["learning_curve"] = learnt(record)
    record["findings"] = findings(record)
    write_record(folder, record)
    write_atomically(folder / "comparison.csv", as_csv(record))


def _print_run(console: Console, title: str, run: dict[str, Any]) -> None:
    """Print a line about a run that has ended."""
    speed = f", {shown(run['tokens_per_second'])} tokens/s" if run["tokens_per_second"] else ""
    reason = f": {run['reason']}" if run["reason"] else ""
    line = f"{title}: {run['status']}{speed} ({run['seconds']:.0f} s in all){reason}"
    console.print(wrapped(printable(line)), markup=False, soft_wrap=True)
