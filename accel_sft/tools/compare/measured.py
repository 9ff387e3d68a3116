"""Reads the measurements of each run from the run's folder, and summarises them for each setting."""

import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import LAYOUT
from accel_sft.io.files import is_number, mapping, read_object
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.child import COMPLETE
from accel_sft.tools.report.runs import NUMBERS
from accel_sft.tracking import disturbed
from accel_sft.tracking.metrics_file import mean_mfu, read_lines
from accel_sft.tracking.time_spent import BATCHES

EXECUTION = LAYOUT | {"launch", "num_processes", "mixed_precision"}
"""Options that decide how a step is executed, not what it computes."""
_END_BYTES = 4096
"""Bytes read from the end of metrics.jsonl to find the newest step."""


def measure(run_dir: RunDir, discard_steps: int) -> dict[str, Any]:
    """The run's recorded measurements, even if the run failed or was killed; missing values are None. The time of the
    first `discard_steps` steps does not count."""
    steps = training_lines(run_dir)
    counted = steps[discard_steps:]
    result, record = read_object(run_dir.result), read_object(run_dir.record)
    launch, after = mapping(record.get("launch")), mapping(result.get("after"))
    main_metric = str(result.get("main_metric"))
    low, high = mapping(mapping(result.get("intervals")).get("after")).get(main_metric) or (None, None)
    ranks, spent = result.get("system") or [], mapping(result.get("time_spent"))
    batches = mapping(spent.get("parts")).get(BATCHES)
    host, segments = mapping(launch.get("host")), disturbed.disturbed_segments(counted)
    return {
        "steps": len(steps),
        **_speed(counted, launch.get("processes")),
        "peak_device_memory_gib": result.get("peak_device_memory_gib"),
        "mean_device_memory_gib": max(_of(ranks, "mean", "gpu_memory_gib"), default=None),
        "device_percent": statistics.fmean(percents) if (percents := _of(ranks, "mean", "gpu_percent")) else None,
        "cpu_percent": sum(_of(ranks, "mean", "cpu_percent")) if ranks else None,
        "peak_host_memory_gib": result.get("peak_host_memory_gib"),
        "host_memory_all_ranks_gib": sum(_of(ranks, "peak", "process_memory_gib")) if ranks else None,
        "batch_share": batches / spent["seconds"] if batches is not None and spent.get("seconds") else None,
        "metric_after": metric if is_number(metric := after.get(main_metric)) else None,
        "metric_low": low,
        "metric_high": high,
        "eval_loss_after": loss if is_number(loss := after.get("eval_loss")) else None,
        "disturbed": disturbed.sentences(segments) if disturbed.share(counted, segments) >= disturbed.MUCH else [],
        "environment": {
            **{key: launch.get(key) for key in ("device", "versions")},
            **{key: host.get(key) for key in ("cores", "platform")},
            "data": record.get("data_sha256"),
        },
    }


def training_lines(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are optimizer steps; empty if the file cannot be read."""
    try:
        return [line for line in read_lines(run_dir.metrics) if "loss" in line]
    except OSError:
        return []


def last_step(run_dir: RunDir) -> int:
    """The newest step in metrics.jsonl; 0 before the first step. This reads only the file's end, to be fast."""
    if not run_dir.metrics.is_file():
        return 0
    with run_dir.metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        numbers = re.findall(rb'"step": (\d{1,18})\b', file.read(_END_BYTES))
    return int(numbers[-1]) if numbers else 0


def _speed(counted: Sequence[Mapping[str, Any]], processes: int | None) -> dict[str, Any]:
    seconds = [line["seconds"] for line in counted if is_number(line.get("seconds"))]
    tokens = sum(line["tokens"] for line in counted if is_number(line.get("tokens")))
    speed = tokens / sum(seconds) if seconds and sum(seconds) else None
    return {
        "step_seconds": seconds,
        "median_step_seconds": statistics.median(seconds) if seconds else None,
        "tokens_per_second": speed,
        "tokens_per_second_per_device": speed / processes if speed and processes else None,
        "mfu": mean_mfu(counted),
    }


def _of(ranks: Sequence[Mapping[str, Any]], kind: str, field: str) -> list[float]:
    return [rank[kind][field] for rank in ranks if is_number(rank[kind].get(field))]


def summarise(record: dict[str, Any], folder: Path) -> None:
    """Add to each setting the summary of its runs; times are those of undisturbed rounds, if there are any."""
    settings = record["settings"]
    for setting in settings:
        runs, done = setting["runs"], completed(setting)
        last = runs[-1] if runs else {"status": "not run", "reason": ""}
        setting["status"], setting["reason"] = (COMPLETE, "") if done else (last["status"], last["reason"])
        setting["disturbed"] = {run["round"]: run["disturbed"] for run in done if run["disturbed"]}
        calm = [run for run in done if run["round"] not in setting["disturbed"]] or done
        # numbers other than memory and metrics are times, which depend on the machine's other work
        counted = {key: done if key.endswith(("_gib", "_after", "_low", "_high")) else calm for key in NUMBERS}
        numbers = {key: [run[key] for run in of_key if is_number(run.get(key))] for key, of_key in counted.items()}
        setting["median"] = {key: statistics.median(values) if values else None for key, values in numbers.items()}
        setting["spread"] = {key: _spread(values) for key, values in numbers.items()}
    best = max(filter(None, (setting["median"]["tokens_per_second"] for setting in settings)), default=None)
    for setting in settings:
        speed = setting["median"]["tokens_per_second"]
        setting["ratio_to_best"] = speed / best if speed and best else None
        setting["loss_difference"] = _loss_difference(setting, settings, folder)


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
    """Compare a setting's loss curves with the first completed run of the first setting that trains the same. Return
    the largest relative difference at equal steps; None for this first setting, or without a curve to compare."""
    first = next((other for other in settings if completed(other) and _learnt(other) == _learnt(setting)), None)
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


def _learnt(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The setting's values that affect what a step computes."""
    return {name: value for name, value in setting["values"].items() if name not in EXECUTION}


def _losses(folder: Path, run: Mapping[str, Any]) -> dict[int, float]:
    lines = training_lines(RunDir(folder / run["folder"]))
    return {line["step"]: line["loss"] for line in lines if is_number(line["loss"])}
