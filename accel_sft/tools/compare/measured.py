"""Reads what each run measured from its folder, and summarises the runs of each setting."""

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import LAYOUT
from accel_sft.io.files import is_number, mapping, read_object
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory
from accel_sft.launch.child import COMPLETE
from accel_sft.tools.compare.settings import same_but
from accel_sft.tools.report.runs import NUMBERS
from accel_sft.tracking import disturbed
from accel_sft.tracking.metrics_file import mean_mfu, read_lines
from accel_sft.tracking.time_spent import BATCHES

EXECUTION = LAYOUT | {"launch", "num_processes", "mixed_precision"}
"""Options that decide how a step is executed, not what it computes."""
_VOLATILE = ("load_before", "free_host_memory_before_gib")
"""Facts that change from run to run, and are listed for every run even if all runs have the same."""
_END_BYTES = 4096
"""Bytes read from the end of metrics.jsonl to find the newest step."""


def measure(run_dir: RunDir, discard_steps: int) -> dict[str, Any]:
    """What the run recorded, even if it failed or was killed; what it did not record is None.

    Args:
        discard_steps: number of first steps whose time is not counted.
    """
    steps = training_lines(run_dir)
    counted = steps[discard_steps:]
    result, record = read_object(run_dir.result), read_object(run_dir.record)
    launch, after = mapping(record.get("launch")), mapping(result.get("after"))
    main_metric = str(result.get("main_metric"))
    interval = mapping(mapping(result.get("intervals")).get("after")).get(main_metric) or (None, None)
    ranks = result.get("system") or []
    host = mapping(launch.get("host"))
    segments = disturbed.disturbed_segments(counted)
    return {
        "steps": len(steps),
        "total_steps": record.get("total_steps"),
        **_speed(counted, launch.get("processes")),
        "peak_device_memory_gib": result.get("peak_device_memory_gib"),
        "mean_device_memory_gib": max(_of(ranks, "mean", "gpu_memory_gib"), default=None),
        "device_percent": statistics.fmean(percents) if (percents := _of(ranks, "mean", "gpu_percent")) else None,
        "cpu_percent": sum(_of(ranks, "mean", "cpu_percent")) if ranks else None,
        "peak_host_memory_gib": result.get("peak_host_memory_gib"),
        "host_memory_all_ranks_gib": sum(_of(ranks, "peak", "process_memory_gib")) if ranks else None,
        "metric_after": _number(after.get(main_metric)),
        "metric_low": interval[0],
        "metric_high": interval[1],
        "eval_loss_after": _number(after.get("eval_loss")),
        "batching": result.get("batching"),
        "memory": result.get("memory") or None,
        "phases": _phases(result.get("phases") or []),
        "batch_share": _batch_share(mapping(result.get("time_spent"))),
        "disturbed": disturbed.sentences(segments) if disturbed.share(counted, segments) >= disturbed.MUCH else [],
        "data_sha256": record.get("data_sha256"),
        "environment": {
            **{key: launch.get(key) for key in ("device", "precision", "threads_per_process", "communication")},
            "cores": host.get("cores"),
            "platform": host.get("platform"),
            "versions": launch.get("versions"),
        },
    }


def training_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are optimizer steps; empty if the file cannot be read."""
    try:
        return [line for line in read_lines(run_dir.metrics) if "loss" in line]
    except OSError:
        return []


def last_step(run_dir: RunDir) -> int:
    """The newest step in metrics.jsonl, 0 before the first. Reads only the file's end, as it is called often."""
    if not run_dir.metrics.is_file():
        return 0
    with run_dir.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        numbers = re.findall(rb'"step": (\d{1,18})\b', file.read(_END_BYTES))
    return int(numbers[-1]) if numbers else 0


def surroundings() -> dict[str, float]:
    """How busy the machine is before a launch: its load over a minute, and its free host memory in GiB."""
    return {"load_before": os.getloadavg()[0], "free_host_memory_before_gib": host_memory.free_bytes() / 2**30}


def _speed(counted: Sequence[Mapping[str, Any]], processes: int | None) -> dict[str, Any]:
    seconds = [line["seconds"] for line in counted if is_number(line.get("seconds"))]
    tokens = sum(line["tokens"] for line in counted if is_number(line.get("tokens")))
    median = statistics.median(seconds) if seconds else None
    spread = None
    if median and len(seconds) > 1:
        tenths = statistics.quantiles(seconds, n=10, method="inclusive")
        spread = (tenths[-1] - tenths[0]) / median
    speed = tokens / sum(seconds) if seconds and sum(seconds) else None
    return {
        "step_seconds": seconds,
        "median_step_seconds": median,
        "step_seconds_spread": spread,
        "tokens_per_second": speed,
        "tokens_per_second_per_device": speed / processes if speed and processes else None,
        "mfu": mean_mfu(counted),
    }


def _phases(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The run's memory at the end of each start-up phase: each number is the largest over all ranks."""
    phases: dict[str, dict[str, Any]] = {}
    for row in rows:
        largest = phases.setdefault(row["phase"], {"phase": row["phase"]})
        for key, value in row.items():
            if key.endswith("_gib") and is_number(value):
                largest[key] = max(value, largest.get(key, value))
    return [*phases.values()]


def _batch_share(time_spent: Mapping[str, Any]) -> float | None:
    """The share of the steps' time that rank 0 spent reading rows and making batches; None if not recorded."""
    batches = mapping(time_spent.get("parts")).get(BATCHES)
    return batches / time_spent["seconds"] if batches is not None and time_spent.get("seconds") else None


def _number(value: Any) -> float | None:
    """The value of a task's metric, which may be anything; None if it is no number."""
    return value if is_number(value) else None


def _of(ranks: Sequence[Mapping[str, Any]], kind: str, field: str) -> list[float]:
    return [rank[kind][field] for rank in ranks if is_number(rank[kind].get(field))]


def summarise(record: dict[str, Any], folder: Path) -> None:
    """Add to each setting the summary of its runs, and to the record the differences between settings and between runs.

    Times are those of undisturbed rounds, unless a setting has no such round.
    """
    settings = record["settings"]
    for setting in settings:
        runs, done = setting["runs"], completed(setting)
        last = runs[-1] if runs else {"status": "not run", "reason": ""}
        setting["status"], setting["reason"] = (COMPLETE, "") if done else (last["status"], last["reason"])
        setting["disturbed"] = {run["round"]: run["disturbed"] for run in done if run["disturbed"]}
        calm = [run for run in done if run["round"] not in setting["disturbed"]] or done
        # all but memory and metrics are times, which depend on what else the machine does
        counted = {key: done if key.endswith(("_gib", "_after", "_low", "_high")) else calm for key in NUMBERS}
        numbers = {key: [run[key] for run in of_key if is_number(run.get(key))] for key, of_key in counted.items()}
        setting["median"] = {key: statistics.median(values) if values else None for key, values in numbers.items()}
        setting["spread"] = {key: _spread(values) for key, values in numbers.items()}
    best = max(filter(None, (setting["median"]["tokens_per_second"] for setting in settings)), default=None)
    for setting in settings:
        speed = setting["median"]["tokens_per_second"]
        setting["ratio_to_best"] = speed / best if speed and best else None
        setting["loss_difference"] = _loss_difference(setting, settings, folder)
    record["differences"] = {"settings": _differing(settings, record["varied"]), "environment": _environment(settings)}


def completed(setting: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a setting that completed."""
    return [run for run in setting["runs"] if run["status"] == COMPLETE]


def _spread(values: Sequence[float]) -> float | None:
    """The range of the rounds' values as a share of their median; None after a single round, or if the median is 0."""
    median = statistics.median(values) if len(values) > 1 else None
    return (max(values) - min(values)) / abs(median) if median else None


def _loss_difference(
    setting: Mapping[str, Any], settings: Sequence[Mapping[str, Any]], folder: Path
) -> dict[str, Any] | None:
    """The largest relative difference, at equal steps, of a setting's loss curves from that of the first completed run
    of the first setting that learns the same; None for that setting itself, and if there is nothing to compare."""
    first = next((other for other in settings if completed(other) and same_but(other, setting, EXECUTION)), None)
    if first is None or first is setting:
        return None
    reference = _losses(folder, completed(first)[0])
    differences = [
        {"relative": abs(loss - reference[step]) / abs(reference[step]), "step": step, "to": first["name"]}
        for run in completed(setting)
        for step, loss in _losses(folder, run).items()
        if reference.get(step)
    ]
    return max(differences, key=lambda difference: difference["relative"], default=None)


def _losses(folder: Path, run: Mapping[str, Any]) -> dict[int, float]:
    lines = training_lines(RunDir(folder / run["folder"]))
    return {line["step"]: line["loss"] for line in lines if is_number(line["loss"])}


def _differing(settings: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The varied options, and the facts about launches that differ, each with its values by setting."""
    differing = {name: {setting["name"]: setting["values"].get(name) for setting in settings} for name in varied}
    for key in settings[0]["launch"]:
        values = {setting["name"]: setting["launch"][key] for setting in settings}
        if len({str(value) for value in values.values()}) > 1:
            differing[f"launch.{key}"] = values
    return differing


def _environment(settings: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Facts by run: load and free memory, and whichever of versions, device, cores and data differ."""
    facts = {f"{setting['name']}, round {run['round']}": _facts(run) for setting in settings for run in setting["runs"]}
    differing = {}
    for key in dict.fromkeys(key for of_run in facts.values() for key in of_run):
        values = {name: of_run[key] for name, of_run in facts.items() if of_run.get(key) is not None}
        if key in _VOLATILE or len({str(value) for value in values.values()}) > 1:
            differing[key] = values
    return differing


def _facts(run: Mapping[str, Any]) -> dict[str, Any]:
    facts = dict(run["environment"])
    versions = {f"{name} version": version for name, version in (facts.pop("versions", None) or {}).items()}
    for of_launch in ("precision", "communication", "threads_per_process"):  # listed with the settings
        facts.pop(of_launch, None)
    return {**facts, **versions, "data": run.get("data_sha256")}
