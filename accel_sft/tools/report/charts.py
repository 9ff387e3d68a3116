"""Collects what was measured at which step, and makes the page's charts from it: Vega-Lite specifications and rows.

The page's own controls set which runs are shown, and over which steps. Colours are the page's CSS variables, so that a
chart follows light, dark and print without being drawn again.
"""

import math
from collections.abc import Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.text import one_line
from accel_sft.results.run_report import COSTS
from accel_sft.tools.report.runs import Comparison, Run

POINTS_OF_A_CHART = 1600
"""Approximate number of points in all curves of a chart: more would exceed the chart's pixels, or fill the page."""
_FEWEST, _MOST = 60, 1000
"""Bounds on the points that a thinned curve may keep."""

MEASURED = {
    "loss": ("Training loss", "nats per supervised token", "main"),
    "eval_loss": ("Validation loss", "nats per supervised token", "main"),
    "tokens_per_second": ("Training speed", "tokens per second", "main"),
    "mfu": ("Model FLOPs utilisation", "share of the devices' peak", "main"),
    "learning_rate": ("Learning rate", "learning rate per step", "main"),
    "grad_norm": ("Gradient norm", "L2 norm before clipping", "more"),
    "seconds": ("Step time", "seconds per step", "more"),
}
"""Maps a measured key to the title, unit and group of its chart; the task's metrics have no entry."""
_NOT_CURVES = {"step", "epoch", "tokens", "supervised_tokens", "tokens_per_second_per_device", *COSTS}
_BY_SOURCE = "rows/", "tokens/"

_GROUPS = {"main": "Curves", "more": "More curves"}
_DRAWN_AS_POINTS = 30
"""A curve with at most this many points has a mark at each point."""

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--line)"
COLOURS = tuple(f"var(--c{number})" for number in range(1, 7))
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
"""Vega's dash patterns (lengths in pixels): the seventh series has the first series' colour and the second pattern."""

CONFIG = {
    "background": "transparent",
    "font": "system-ui, sans-serif",
    "view": {"stroke": "transparent"},
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "gridColor": GRID,
        "domainColor": FAINT,
        "tickColor": FAINT,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleLimit": 0,
        "titleFontWeight": "normal",
        "labelOverlap": "greedy",
        "labelSeparation": 8,
    },
    # the title is above the axis: beside it, a low chart would cut off the title, and a long title would take width
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleX": 0, "titleY": -8},
}

Chart = dict[str, Any]


def measured(runs: Sequence[Run], series: Sequence[str]) -> list[Chart]:
    """Return a chart for each measured key, in the order of the page. A chart has `kind`, `title`, `group` ("main" or
    "more"), `spec` and `curves`. A curve has `run` (the run's index in `runs`), `steps` and `values`."""
    points: dict[str, dict[int, dict[int, float]]] = {}  # by key, then by run, then by step
    for place, run in enumerate(runs):
        for row in (*run.steps, *run.evaluations):
            for key in row.keys() - _NOT_CURVES:
                if not key.startswith(_BY_SOURCE) and is_number(row[key]) and math.isfinite(row[key]):
                    points.setdefault(key, {}).setdefault(place, {})[row["step"]] = row[key]
    metrics = sorted(points.keys() - MEASURED.keys())
    main = [key for key in metrics if any(run.result.get("main_metric") == key for run in runs)] or metrics[:1]
    order = ["loss", "eval_loss", *main, *MEASURED, *metrics]
    return [_measured(key, points[key], key in main, series) for key in dict.fromkeys(order) if key in points]


def _measured(key: str, curves: dict[int, dict[int, float]], main: bool, series: Sequence[str]) -> Chart:
    name = one_line(key, 80)
    title, unit, group = MEASURED.get(key, (f"Validation: {name}", name, "main" if main else "more"))
    most = min(_MOST, max(_FEWEST, POINTS_OF_A_CHART // len(curves)))
    drawn = []
    for run, by_step in curves.items():
        steps, values = zip(*thin(sorted(by_step.items()), most), strict=True)
        drawn.append({"run": run, "steps": steps, "values": [float(f"{value:.6g}") for value in values]})
    spec = curve_spec(title, unit, series, few=max(map(len, curves.values())) <= _DRAWN_AS_POINTS)
    return {"kind": "curves", "title": title, "group": group, "curves": drawn, "spec": spec}


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """At most `most` points, in order: the first, the last, and the smallest and largest of each segment, so that every
    spike stays."""
    if len(points) <= most:
        return list(points)
    inner, segments = points[1:-1], (most - 2) // 2
    places = {0, len(points) - 1}
    for number in range(segments):
        start, end = (len(inner) * edge // segments for edge in (number, number + 1))
        by_value = sorted(range(start, end), key=lambda place: inner[place][1])
        places |= {by_value[0] + 1, by_value[-1] + 1}
    return [points[place] for place in sorted(places)]


def groups(runs: Sequence[Run], series: Sequence[str], comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The groups of charts in the order of the page: first learning curves of comparisons, then those of `measured`.

    Each group has an `id`, a `heading` and `charts`. A chart has an `id`, a `title`, a `spec`, and its data under
    `curves` or `rows`, as `kind` says.
    """
    learnt = [
        {
            "kind": "rows",
            "title": f"{comparison.name}: by number of rows",
            "rows": comparison.learnt,
            "spec": learning_curve(comparison.record["main_metric"]),
        }
        for comparison in comparisons
        if comparison.learnt
    ]
    made: list[dict[str, Any]] = [{"id": "rows", "heading": "Metric by number of training rows", "charts": learnt}]
    curves = measured(runs, series)
    for name, heading in _GROUPS.items():
        made.append({"id": name, "heading": heading, "charts": [c for c in curves if c["group"] == name]})
    for group in made:
        for number, chart in enumerate(group["charts"]):
            chart["id"] = f"{group['id']}-{number}"
    return made


def look(series: Sequence[str]) -> list[dict[str, Any]]:
    """The colour and the dash pattern of each series."""
    return [
        {"name": name, "colour": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]}
        for place, name in enumerate(series)
    ]


def _chart(description: str, **parts: Any) -> dict[str, Any]:
    """Return a specification: `parts`, and what all charts share. The page sets the width and the data (`rows`)."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": 220,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"name": "rows"},
        **parts,
    }


def _number(field: str, **parts: Any) -> dict[str, Any]:
    """An encoding, or a line of a tooltip, that shows a field of numbers."""
    return {"field": field, "type": "quantitative", **parts}


def _word(field: str, **parts: Any) -> dict[str, Any]:
    """An encoding, or a tooltip's line, for a field whose values are names."""
    return {"field": field, "type": "nominal", **parts}


def _of_series(series: Sequence[str], key: str) -> dict[str, Any]:
    """Return an encoding that distinguishes series by `key`: "colour" or "dash"."""
    values = [one[key] for one in look(series)]
    scale = {"domain": [*range(len(series))], "range": [[*value] if key == "dash" else value for value in values]}
    return _word("series", scale=scale, legend=None)


def curve_spec(title: str, unit: str, series: Sequence[str], few: bool) -> dict[str, Any]:
    """A chart with a line for each run over steps, and a mark for each point if there are `few`; dragging selects a
    range, `brush`."""
    x = _number("step", title="optimizer step", axis={"tickMinStep": 1, "format": ",.6~g"})
    x["scale"] = {"zero": False, "nice": False, "domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}}
    y = _number("value", title=unit, scale={"zero": False}, axis={"format": ",.6~g"})
    tooltip = [
        _word("run", title="run"),
        _number("step", title="step", format=",d"),
        _number("value", title=unit, format=".5~g"),
    ]
    colour = _of_series(series, "colour")
    line = {
        "mark": {"type": "line", "clip": True, "strokeWidth": 1.8, "point": {"size": 28} if few else False},
        "params": [{"name": "brush", "select": {"type": "interval", "encodings": ["x"], "clear": "window:pointerup"}}],
        "encoding": {"color": colour, "strokeDash": _of_series(series, "dash"), "detail": {"field": "line"}},
    }
    hover = {"type": "point", "on": "pointermove", "nearest": True, "clear": "pointerout"}
    point = {
        "mark": {"type": "point", "clip": True, "filled": True, "size": 60, "aria": False},
        "params": [{"name": "hover", "select": hover}],
        "encoding": {
            "color": colour,
            "tooltip": tooltip,
            "opacity": {"condition": {"param": "hover", "empty": False, "value": 1}, "value": 0},
        },
    }
    return _chart(
        f"{title} over the steps of training, a line for each run; vertical axis: {unit}.",
        # what the page's controls set: the series to show, and the range of steps (null: all)
        params=[
            {"name": "shown", "value": [*range(len(series))]},
            {"name": "low", "value": None},
            {"name": "high", "value": None},
        ],
        transform=[
            {"filter": "indexof(shown, datum.series) >= 0"},
            {"filter": "(low === null || datum.step >= low) && (high === null || datum.step <= high)"},
        ],
        encoding={"x": x, "y": y},
        layer=[line, point],
    )


def learning_curve(metric: str) -> dict[str, Any]:
    """The metric over the number of training rows: a point for each training, and the forecast with its interval."""
    rows = _number("rows", title="training rows", scale={"type": "log", "nice": False}, axis={"format": "~s"})
    hover = {"tooltip": {"content": "data"}}
    ahead = [{"filter": "isValid(datum.value)"}]
    low = _number("low", title=f"{metric} after training", scale={"zero": False})
    band = {
        "transform": ahead,
        "mark": {"type": "area", "opacity": 0.18},
        "encoding": {"y": low, "y2": {"field": "high"}},
    }
    line = {
        "transform": ahead,
        "mark": {"type": "line", "strokeDash": [5, 3], "point": {"opacity": 0, "size": 60}, **hover},
        "encoding": {"y": _number("value")},
    }
    points = {
        "transform": [{"filter": "isValid(datum.metric)"}],
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, **hover},
        "encoding": {"y": _number("metric")},
    }
    return _chart(
        "The metric after training by the number of training rows; the dashed line is the forecast, with its interval.",
        height=300,
        encoding={"x": rows, "color": {"value": COLOURS[0]}},
        layer=[band, line, points],
    )
