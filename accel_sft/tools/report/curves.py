"""Collects the curves of runs: what was measured at which step, thinned to what a chart can show."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.text import one_line
from accel_sft.results.run_report import COSTS
from accel_sft.tools.report.runs import Run

POINTS_OF_A_CHART = 1600
"""About how many points a chart's curves have together: more fit neither its pixels nor, with many runs, the page."""
_FEWEST, _MOST = 60, 1000
"""Bounds on the points that a thinned curve may keep."""
_KNOTS = 200
"""About how many steps of a run have their training time on the page, which interpolates between them."""

MEASURED = {
    "loss": ("Training loss", "nats per supervised token", "main"),
    "eval_loss": ("Validation loss", "nats per supervised token", "main"),
    "tokens_per_second": ("Training speed", "tokens per second", "main"),
    "mfu": ("Model FLOPs utilisation", "share of the devices' peak", "main"),
    "learning_rate": ("Learning rate", "learning rate per step", "main"),
    "grad_norm": ("Gradient norm", "L2 norm before clipping", "more"),
    "seconds": ("Step time", "seconds per step", "more"),
    "process_memory_gib": ("Host memory of each rank", "resident memory (GiB)", "ranks"),
    "host_memory_gib": ("Host memory of the machine", "memory in use by all (GiB)", "ranks"),
    "cpu_percent": ("CPU of each rank", "CPU use (% of one core)", "ranks"),
    "gpu_memory_gib": ("GPU memory of each rank's device", "memory in use by all (GiB)", "ranks"),
    "forward_seconds": ("Batches and forwards of each rank", "seconds since the start", "ranks"),
    "busy_cores": ("Cores in use", "cores that run any process", "ranks"),
    "gpu_clock_mhz": ("Clock of each rank's GPU", "MHz", "ranks"),
    "gpu_percent": ("GPU use of each rank's device", "time with a kernel running (%)", "ranks"),
}
"""Title, unit and group of a chart by the key of what it shows; charts of the task's metrics have no entry."""
_NOT_CURVES = {"step", "epoch", "tokens", "supervised_tokens", "tokens_per_second_per_device", *COSTS}
_BY_SOURCE = "rows/", "tokens/"
_TAG = re.compile(r"system/rank(\d+)/(\w+)")
Readings = dict[tuple[str, int], dict[int, float]]
"""Readings by step, of each (field of `system.SYSTEM_FIELDS`, rank)."""


def charts(runs: Sequence[Run], readings: Sequence[Readings]) -> list[dict[str, Any]]:
    """Return a chart for each key that was measured, in the order of the page.

    Returns:
        for each chart `key`, `title`, `unit`, `group` ("main", "more" or "ranks"), `thinned` (whether points are left
        out) and `curves`. A curve has `run` (its index in `runs`), `rank` or None, the lists `steps` and `values`, and
        if it is thinned `means`: pairs of a step and the mean around it.
    """
    points: dict[str, dict[tuple[int, int | None], dict[int, float]]] = {}  # by key, then by run and rank, then by step
    for place, run in enumerate(runs):
        for row in (*run.steps, *run.evaluations):
            for key in row.keys() - _NOT_CURVES:
                if not key.startswith(_BY_SOURCE) and is_number(row[key]) and math.isfinite(row[key]):
                    points.setdefault(key, {}).setdefault((place, None), {})[row["step"]] = row[key]
        for (field, rank), curve in readings[place].items():
            if field in MEASURED:
                finite = {step: value for step, value in curve.items() if math.isfinite(value)}
                points.setdefault(field, {})[place, rank] = finite
    metrics = sorted(points.keys() - MEASURED.keys())
    main = [key for key in metrics if any(run.result.get("main_metric") == key for run in runs)] or metrics[:1]
    order = ["loss", "eval_loss", *main, *MEASURED, *metrics]
    return [_chart(key, points[key], key in main) for key in dict.fromkeys(order) if key in points]


def _chart(key: str, curves: dict[tuple[int, int | None], dict[int, float]], main: bool) -> dict[str, Any]:
    name = one_line(key, 80)
    title, unit, group = MEASURED.get(key, (f"Validation: {name}", name, "main" if main else "more"))
    most = min(_MOST, max(_FEWEST, POINTS_OF_A_CHART // len(curves)))
    drawn: list[dict[str, Any]] = []
    for (run, rank), by_step in curves.items():
        points = sorted(by_step.items())
        thinned = thin(points, most)
        steps, values = [step for step, _ in thinned], [float(f"{value:.6g}") for _, value in thinned]
        drawn.append({"run": run, "rank": rank, "steps": steps, "values": values})
        if len(thinned) < len(points):
            drawn[-1]["means"] = means(points, most // 2)
    is_thinned = any("means" in curve for curve in drawn)
    return {"key": key, "title": title, "unit": unit, "group": group, "thinned": is_thinned, "curves": drawn}


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points, in order: the first, the last, and the smallest and largest of each segment.

    This keeps every spike.
    """
    if len(points) <= most:
        return list(points)
    inner, segments = points[1:-1], (most - 2) // 2
    places = {0, len(points) - 1}
    for number in range(segments):
        start, end = (len(inner) * edge // segments for edge in (number, number + 1))
        by_value = sorted(range(start, end), key=lambda place: inner[place][1])
        places |= {by_value[0] + 1, by_value[-1] + 1}
    return [points[place] for place in sorted(places)]


def means(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return the means of `most` equal segments, each mean with the step in the middle of its segment."""
    averages = []
    for number in range(most):
        segment = points[len(points) * number // most : len(points) * (number + 1) // most]
        mean = sum(value for _, value in segment) / len(segment)
        averages.append((segment[len(segment) // 2][0], float(f"{mean:.6g}")))
    return averages


def training_minutes(run: Run) -> dict[str, list[float]]:
    """Minutes of training up to some steps of the run: lists `steps` and `minutes`, empty if no step has its time."""
    passed, knots = 0.0, [(0, 0.0)]
    for row in run.steps:
        if is_number(row.get("seconds")) and math.isfinite(row["seconds"]):
            passed += row["seconds"]
            knots.append((row["step"], passed / 60))
    if len(knots) == 1:
        return {"steps": [], "minutes": []}
    every = math.ceil(len(knots) / _KNOTS)
    knots = [*knots[:-1:every], knots[-1]]
    return {"steps": [step for step, _ in knots], "minutes": [round(minutes, 4) for _, minutes in knots]}


def left_out(charts: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence on what the curves leave out, if anything."""
    titles = [chart["title"].lower() for chart in charts if chart["thinned"]]
    if not titles:
        return []
    return [
        f"The curves of {', '.join(titles)} have more points than a chart can show. Of each segment of steps a curve "
        "has the smallest and the largest value, so no spike is lost; smoothed, the mean. metrics.jsonl has all."
    ]


def system_readings(run: Run) -> Readings:
    """Return each rank's CPU, memory and GPU use from the run's TensorBoard files, as metrics.jsonl does not have them,
    without what a resumed run measured anew; empty if there are no event files.

    A file that is damaged is read as far as possible, and the run's notes say so.
    """
    paths = sorted(path for path in run.folder.path.glob("events.out.tfevents.*") if path.is_file())
    if not paths:
        return {}
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    readings: Readings = defaultdict(dict)
    for path in paths:
        try:
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                    _drop_from(readings, event.step)
                for value in event.summary.value:
                    if tag := _TAG.fullmatch(value.tag):
                        readings[tag[2], int(tag[1])][event.step] = value.simple_value
        except (OSError, DecodeError, RuntimeError) as error:
            run.notes.append(f"{path.name} is read as far as it goes: {type(error).__name__}")
    return dict(readings)


def _drop_from(readings: Readings, step: int) -> None:
    """Drop the readings from a step on: a session that starts there replaces them."""
    for curve in readings.values():
        for later in [number for number in curve if number >= step]:
            del curve[later]
