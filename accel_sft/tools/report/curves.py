"""Collects the curves of runs: what was measured at which step, thinned to what a chart can show."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from accel_sft.io.text import one_line
from accel_sft.tools.report.events import Readings
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.run_report import COSTS, is_number

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


def charts(runs: Sequence[Run], readings: Sequence[Readings]) -> list[dict[str, Any]]:
    """Return a chart for each key that was measured, in the order of the page.

    Returns:
        for each chart `key`, `title`, `unit`, `group` ("main", "more" or "ranks"), `thinned` (whether points are left
        out) and `curves`. A curve has `run` (its index in `runs`), `rank` or None, the lists `steps` and `values`, and
        if it is thinned `means`: pairs of a step and the mean around it.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for place, run in enumerate(runs):
        for row in (*run.steps, *run.evaluations):
            for key in row.keys() - _NOT_CURVES:
                if key.startswith(_BY_SOURCE):
                    continue
                if is_number(row[key]) and math.isfinite(row[key]):
                    _curve(found, key, place, None)[row["step"]] = row[key]
        for (field, rank), curve in readings[place].items():
            if field in MEASURED:
                _curve(found, field, place, rank).update({s: n for s, n in curve.items() if math.isfinite(n)})
    metrics = sorted(found.keys() - MEASURED.keys())
    main = [key for key in metrics if any(run.result.get("main_metric") == key for run in runs)] or metrics[:1]
    order = ["loss", "eval_loss", *main, *MEASURED, *metrics]
    return [_chart(key, found[key], key in main) for key in dict.fromkeys(order) if key in found]


def _curve(found: dict[str, list[dict[str, Any]]], key: str, run: int, rank: int | None) -> dict[int, float]:
    curves = found.setdefault(key, [])
    for curve in reversed(curves):
        if (curve["run"], curve["rank"]) == (run, rank):
            return curve["points"]
    curves.append({"run": run, "rank": rank, "points": {}})
    return curves[-1]["points"]


def _chart(key: str, curves: Sequence[dict[str, Any]], main: bool) -> dict[str, Any]:
    name = one_line(key, 80)
    title, unit, group = MEASURED.get(key, (f"Validation: {name}", name, "main" if main else "more"))
    most = min(_MOST, max(_FEWEST, POINTS_OF_A_CHART // len(curves)))
    thinned, drawn = False, []
    for curve in curves:
        points = sorted(curve["points"].items())
        kept = thin(points, most)
        steps, values = [step for step, _ in kept], [float(f"{value:.6g}") for _, value in kept]
        found = {"run": curve["run"], "rank": curve["rank"], "steps": steps, "values": values}
        if len(kept) < len(points):
            thinned, found["means"] = True, means(points, most // 2)
        drawn.append(found)
    return {"key": key, "title": title, "unit": unit, "group": group, "thinned": thinned, "curves": drawn}


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most `most` points, in order: the first, the last, and the smallest and largest of each stretch.

    This keeps every spike.
    """
    if len(points) <= most:
        return list(points)
    inner, stretches = points[1:-1], (most - 2) // 2
    kept = {0: points[0], len(points) - 1: points[-1]}
    for number in range(stretches):
        start, end = (len(inner) * edge // stretches for edge in (number, number + 1))
        stretch = range(start, end)
        for place in (min(stretch, key=lambda i: inner[i][1]), max(stretch, key=lambda i: inner[i][1])):
            kept[place + 1] = inner[place]
    return [kept[place] for place in sorted(kept)]


def means(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return the means of `most` equal stretches, each mean with the step in the middle of its stretch."""
    found = []
    for number in range(most):
        stretch = points[len(points) * number // most : len(points) * (number + 1) // most]
        found.append((stretch[len(stretch) // 2][0], float(f"{sum(v for _, v in stretch) / len(stretch):.6g}")))
    return found


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
    kept = [*knots[:-1:every], knots[-1]]
    return {"steps": [step for step, _ in kept], "minutes": [round(minutes, 4) for _, minutes in kept]}


def left_out(charts: Iterable[dict[str, Any]]) -> list[str]:
    """A sentence on what the curves leave out, if anything."""
    titles = [chart["title"].lower() for chart in charts if chart["thinned"]]
    if not titles:
        return []
    return [
        f"The curves of {', '.join(titles)} have more points than a chart can show. Of each stretch of steps a curve "
        "has the smallest and the largest value, so no spike is lost; smoothed, the mean. metrics.jsonl has all."
    ]
