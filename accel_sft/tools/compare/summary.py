"""Summarises the runs of each cell: medians, spreads, ratios to the best, and by how much loss curves differ."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.changes import LAYOUT
from accel_sft.io.run_dir import RunDir
from accel_sft.tools.compare.measured import NUMBERS, TIMES, training_lines
from accel_sft.tools.compare.outcome import COMPLETE, NOT_RUN
from accel_sft.tracking.run_report import is_number

EXECUTION = LAYOUT | {"launch", "num_processes", "mixed_precision"}
"""Settings that decide how a step is executed, not what it computes."""
_VOLATILE = ("load_before", "free_host_memory_before_gib")
"""Facts that change from run to run, and are listed for every run even if all runs have the same."""


def summarise(record: dict[str, Any], folder: Path) -> None:
    """Add to each cell the summary of its runs, and to the record the differences between cells and between runs.

    Times are those of undisturbed rounds, unless a cell has no such round.
    """
    cells = record["cells"]
    for cell in cells:
        runs, done = cell["runs"], completed(cell)
        last = runs[-1] if runs else {"status": NOT_RUN, "reason": ""}
        cell["status"], cell["reason"] = (COMPLETE, "") if done else (last["status"], last["reason"])
        cell["disturbed"] = {run["round"]: run["disturbed"] for run in done if run.get("disturbed")}
        calm = [run for run in done if run["round"] not in cell["disturbed"]] or done
        counted = {key: calm if key in TIMES else done for key in NUMBERS}
        numbers = {key: [run[key] for run in runs if is_number(run.get(key))] for key, runs in counted.items()}
        cell["median"] = {key: statistics.median(found) if found else None for key, found in numbers.items()}
        cell["spread"] = {key: _spread(found) for key, found in numbers.items()}
    best = max(filter(None, (cell["median"]["tokens_per_second"] for cell in cells)), default=None)
    for cell in cells:
        speed = cell["median"]["tokens_per_second"]
        cell["ratio_to_best"] = speed / best if speed and best else None
        cell["loss_difference"] = _loss_difference(cell, cells, folder)
    record["differences"] = {"settings": _settings(cells, record["varied"]), "environment": _environment(cells)}


def completed(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a cell that completed."""
    return [run for run in cell["runs"] if run["status"] == COMPLETE]


def _spread(values: Sequence[float]) -> float | None:
    """The range of the rounds' values as a share of their median; None after a single round, or if the median is 0."""
    median = statistics.median(values) if len(values) > 1 else None
    return (max(values) - min(values)) / abs(median) if median else None


def learns_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two cells differ only in settings that decide how a step is executed."""
    names = (one["settings"].keys() | other["settings"].keys()) - EXECUTION
    return all(one["settings"].get(name) == other["settings"].get(name) for name in names)


def _loss_difference(cell: Mapping[str, Any], cells: Sequence[Mapping], folder: Path) -> dict[str, Any] | None:
    """Return the largest relative difference, at equal steps, of this cell's loss curves from a reference run's curve.

    The reference is the first completed run of the first cell that learns alike. None for that cell itself, and if
    there is nothing to compare.
    """
    first = next((other for other in cells if completed(other) and learns_alike(other, cell)), None)
    if first is None or first is cell or not completed(cell):
        return None
    reference = _losses(folder, completed(first)[0])
    found: dict[str, Any] = {"relative": -1.0, "step": None, "to": first["name"]}
    for run in completed(cell):
        for step, loss in _losses(folder, run).items():
            if reference.get(step):
                relative = abs(loss - reference[step]) / abs(reference[step])
                found = max(found, {**found, "relative": relative, "step": step}, key=lambda each: each["relative"])
    return found if found["step"] is not None else None


def _losses(folder: Path, run: Mapping[str, Any]) -> dict[int, float]:
    lines = training_lines(RunDir(folder / run["folder"]))
    return {line["step"]: line["loss"] for line in lines if is_number(line["loss"])}


def _settings(cells: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the varied options, and the facts about launches that differ, each with its values by cell."""
    found = {name: {cell["name"]: cell["settings"].get(name) for cell in cells} for name in varied}
    for key in cells[0]["launch"]:
        values = {cell["name"]: cell["launch"][key] for cell in cells}
        if len({str(value) for value in values.values()}) > 1:
            found[f"launch.{key}"] = values
    return found


def _environment(cells: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return facts by run: load and free memory, and whichever of versions, device, cores and data differ."""
    runs = {f"{cell['name']}, round {run['round']}": run for cell in cells for run in cell["runs"]}
    known = {name: _flat(run) for name, run in runs.items()}
    found = {}
    for key in dict.fromkeys(key for values in known.values() for key in values):
        values = {name: of_run[key] for name, of_run in known.items() if of_run.get(key) is not None}
        if key in _VOLATILE or len({str(value) for value in values.values()}) > 1:
            found[key] = values
    return found


def _flat(run: Mapping[str, Any]) -> dict[str, Any]:
    about = run["environment"]
    versions = {f"{name} version": version for name, version in (about.get("versions") or {}).items()}
    # versions are added one by one; the other facts follow from the launch, and are listed with the settings
    elsewhere = ("versions", "precision", "communication", "threads_per_process")
    rest = {key: value for key, value in about.items() if key not in elsewhere}
    return {**rest, **versions, "data": run.get("data_sha256")}
