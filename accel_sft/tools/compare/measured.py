"""Reads what a run measured from its folder: metrics.jsonl, result.json and run.json as one flat record."""

import json
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import mapping, read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.launch import host_memory
from accel_sft.tracking import disturbed
from accel_sft.tracking.metrics_file import mean_mfu, read_lines
from accel_sft.tracking.run_report import is_number
from accel_sft.tracking.time_spent import BATCHES

NUMBERS = {
    "median_step_seconds": "step time (s)",
    "step_seconds_spread": "spread of step times within a run",
    "tokens_per_second": "tokens/s",
    "tokens_per_second_per_device": "tokens/s of each device",
    "mfu": "MFU (a share of 1)",
    "peak_device_memory_gib": "peak device memory, largest rank (GiB)",
    "mean_device_memory_gib": "mean device memory, largest rank (GiB)",
    "device_percent": "device use, mean of ranks (%)",
    "cpu_percent": "CPU use, all ranks (100% = one core)",
    "peak_host_memory_gib": "peak host memory, largest rank (GiB)",
    "host_memory_all_ranks_gib": "host memory, all ranks (GiB)",
    "metric_after": "metric after training",
    "metric_low": "its 95% interval: from",
    "metric_high": "to",
    "eval_loss_after": "validation loss after training",
    "seconds": "launch to end (s)",
}
"""Numbers of a run's record, with their titles in tables. A cell (all runs with the same settings) has the median and
the spread of each over its runs."""

TIMES = {key for key in NUMBERS if not key.endswith(("_gib", "_after", "_low", "_high"))}
"""Those of them that depend on what else the machine does."""
_END_BYTES = 4096
"""Bytes read from the end of metrics.jsonl to find the newest step."""


def measure(run_dir: RunDir, discard_steps: int) -> dict[str, Any]:
    """What the run recorded, even if it failed or was killed. A missing or malformed value is None.

    Args:
        discard_steps: number of first steps whose time is not counted.
    """
    steps = training_lines(run_dir)
    result, record = (read_object(path) for path in (run_dir.result, run_dir.record))
    launch, after = mapping(record.get("launch")), mapping(result.get("after"))
    host, ranks = mapping(launch.get("host")), _mappings(result.get("system"))
    found = {
        "steps": len(steps),
        "total_steps": _number(record.get("total_steps")),
        **_speed(steps[discard_steps:], _number(launch.get("processes"))),
        "peak_device_memory_gib": _number(result.get("peak_device_memory_gib")),
        "mean_device_memory_gib": max(_of(ranks, "mean", "gpu_memory_gib"), default=None),
        "device_percent": _mean(_of(ranks, "mean", "gpu_percent")),
        "cpu_percent": sum(_of(ranks, "mean", "cpu_percent")) if ranks else None,
        "peak_host_memory_gib": _number(result.get("peak_host_memory_gib")),
        "host_memory_all_ranks_gib": sum(_of(ranks, "peak", "process_memory_gib")) if ranks else None,
        "metric_after": _number(after.get(str(result.get("main_metric")))),
        **_interval(result),
        "eval_loss_after": _number(after.get("eval_loss")),
        "batching": result.get("batching"),
        "memory": _memory(result) or None,
        "phases": _phases(result),
        "batch_share": _batch_share(result),
        "disturbed": _disturbed(steps[discard_steps:]),
        "data_sha256": record.get("data_sha256"),
        "environment": {
            **{key: launch.get(key) for key in ("device", "precision", "threads_per_process", "communication")},
            "cores": host.get("cores"),
            "platform": host.get("platform"),
            "versions": mapping(launch.get("versions")) or None,
        },
    }
    # UTF-8 cannot hold lone surrogates: each becomes "?"
    return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))


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
        found = re.findall(rb'"step": (\d{1,18})\b', file.read(_END_BYTES))
    return int(found[-1]) if found else 0


def surroundings() -> dict[str, float]:
    """How busy the machine is before a launch: its load over a minute, and its free host memory in GiB."""
    return {"load_before": os.getloadavg()[0], "free_host_memory_before_gib": host_memory.free_bytes() / 2**30}


def _speed(counted: Sequence[Mapping[str, Any]], processes: float | None) -> dict[str, Any]:
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


def _disturbed(counted: Sequence[Mapping[str, Any]]) -> list[str]:
    """The counted steps in which the run was disturbed, in words; [] if they are too few to matter."""
    found = disturbed.stretches(counted)
    return disturbed.sentences(found) if disturbed.share(counted, found) >= disturbed.MUCH else []


def _interval(result: Mapping[str, Any]) -> dict[str, Any]:
    found = mapping(mapping(result.get("intervals")).get("after")).get(str(result.get("main_metric")))
    low, high = found if isinstance(found, list) and len(found) == 2 else (None, None)
    return {"metric_low": _number(low), "metric_high": _number(high)}


def _phases(result: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The run's memory at the end of each start-up phase: each number is the largest over all ranks."""
    found: dict[str, dict[str, Any]] = {}
    for row in _mappings(result.get("phases")):
        phase = str(row.get("phase"))
        largest = found.setdefault(phase, {"phase": phase})
        for key, value in row.items():
            if key.endswith("_gib") and is_number(value):
                largest[key] = max(value, largest.get(key, value))
    return [*found.values()]


def _batch_share(result: Mapping[str, Any]) -> float | None:
    """The share of the steps' time that rank 0 spent reading rows and making batches; None if not recorded."""
    spent = mapping(result.get("time_spent"))
    seconds, batches = (_number(part) for part in (spent.get("seconds"), mapping(spent.get("parts")).get(BATCHES)))
    return batches / seconds if batches is not None and seconds else None


def _memory(result: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Predicted and measured GiB by place (device or host) and phase, if both are recorded."""
    found: dict[str, dict[str, Any]] = {}
    for place, phases in mapping(result.get("memory")).items():
        for phase, pair in mapping(phases).items():
            predicted, measured = (_number(mapping(pair).get(key)) for key in ("predicted_gib", "measured_gib"))
            if predicted is not None and measured:
                found.setdefault(place, {})[phase] = pair
    return found


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def _number(value: Any) -> Any:
    return value if is_number(value) else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a run's file; {} if the run was killed before or while it wrote the file."""
    try:
        return mapping(read_json(path))
    except UserError:
        return {}


def _of(ranks: Sequence[Mapping[str, Any]], kind: str, field: str) -> list[float]:
    return [mapping(rank[kind])[field] for rank in ranks if is_number(mapping(rank.get(kind)).get(field))]


def _mean(numbers: Sequence[float]) -> float | None:
    return sum(numbers) / len(numbers) if numbers else None
