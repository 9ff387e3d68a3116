"""Vega-Lite specifications of the charts. The page adds the data, the runs to show and the range of steps.

Colours are the page's CSS variables, so that a chart follows light, dark and print without being drawn again.
"""

from collections.abc import Sequence
from typing import Any

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--line)"
COLOURS = tuple(f"var(--c{number})" for number in range(1, 7))
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
"""Vega's dash patterns (lengths in pixels): the seventh series has the first one's colour and the second pattern."""

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
    # the title stands above the axis: beside it, a low chart would cut it off, or a long title would take its width
    "axisY": {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleX": 0, "titleY": -8},
    "legend": {"labelColor": INK, "titleColor": INK, "orient": "bottom", "columns": 4, "labelFontSize": 11},
    "text": {"color": INK},
}


def look(series: Sequence[str]) -> list[dict[str, Any]]:
    """The colour and the dash pattern of each series."""
    return [
        {"name": name, "colour": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]}
        for place, name in enumerate(series)
    ]


def chart(description: str, **parts: Any) -> dict[str, Any]:
    """Return a specification with what all charts share. The page sets the width, and the data named `rows`."""
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": 220,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"name": "rows"},
        **parts,
    }


def number(field: str, **parts: Any) -> dict[str, Any]:
    """Return an encoding, or a line of a tooltip, that shows a field of numbers."""
    return {"field": field, "type": "quantitative", **parts}


def word(field: str, **parts: Any) -> dict[str, Any]:
    """Return an encoding, or a line of a tooltip, that shows a field of names."""
    return {"field": field, "type": "nominal", **parts}


def of_series(series: Sequence[str], key: str) -> dict[str, Any]:
    """Return an encoding that tells series apart by `key`: "colour" or "dash"."""
    values = [each[key] for each in look(series)]
    scale = {"domain": [*range(len(series))], "range": [[*value] if key == "dash" else value for value in values]}
    return word("series", scale=scale, legend=None)


SHOWN = {"filter": "indexof(shown, datum.series) >= 0"}


def curves(title: str, unit: str, series: Sequence[str], few: bool) -> dict[str, Any]:
    """Return a chart with a line for each run and rank over steps or minutes (`x`); dragging selects a range, `brush`.

    Args:
        few: whether the curves have so few points that each is marked.
    """
    x = number("x", title="step", axis={"tickMinStep": 1, "format": ",.6~g"})
    x["scale"] = {"zero": False, "nice": False, "domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}}
    y = number("value", title=unit, scale={"zero": False}, axis={"format": ",.6~g"})
    tooltip = [
        word("run", title="run"),
        number("step", title="step", format=",d"),
        number("value", title=unit, format=".5~g"),
    ]
    colour = of_series(series, "colour")
    line = {
        "mark": {"type": "line", "clip": True, "strokeWidth": 1.8, "point": {"size": 28} if few else False},
        "params": [{"name": "brush", "select": {"type": "interval", "encodings": ["x"], "clear": "window:pointerup"}}],
        "encoding": {"color": colour, "strokeDash": of_series(series, "dash"), "detail": {"field": "line"}},
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
    by_line = {"groupby": ["line"], "sort": [{"field": "x"}]}
    neighbours = [{"op": "lag", "field": "x", "as": "before"}, {"op": "lead", "field": "x", "as": "after"}]
    within = "(low === null || datum.x >= low || datum.after >= low)"  # and the next point, for a line to it
    within += " && (high === null || datum.x <= high || (datum.before !== null && datum.before <= high))"
    return chart(
        f"{title} over the steps of training, a line for each run; vertical axis: {unit}.",
        params=range_and_shown(series),
        transform=[SHOWN, {"window": neighbours, **by_line}, {"filter": within}],
        encoding={"x": x, "y": y},
        layer=[line, point],
    )


def range_and_shown(series: Sequence[str]) -> list[dict[str, Any]]:
    """The parameters that the page's controls set: the series to show, and the range of `x` (null: all)."""
    every = {"name": "shown", "value": [*range(len(series))]}
    return [every, {"name": "low", "value": None}, {"name": "high", "value": None}]


def step_seconds(cells: int, series: Sequence[str]) -> dict[str, Any]:
    """A box plot of the times of each cell's counted steps."""
    boxes = {
        "mark": {
            "type": "boxplot",
            "extent": "min-max",
            "size": 13,
            "median": {"color": "var(--paper)"},
            "rule": {"color": FAINT},
        },
        "encoding": {
            "x": number("seconds", title="step time (seconds)", scale={"zero": False}),
            "y": word("name", sort=None, title="cell", axis={"labelLimit": 180}),
            "color": of_series(series, "colour"),
        },
    }
    return chart(
        "Seconds of each counted step, a box plot for each cell of the comparison.",
        height=60 + 26 * cells,
        params=range_and_shown(series),
        transform=[SHOWN],
        layer=[boxes],
    )


def learning_curve(metric: str) -> dict[str, Any]:
    """The metric over the number of training rows: a point for each training, and the forecast with its interval."""
    numbers = {"format": ".4~g"}
    rows = number("rows", title="training rows", scale={"type": "log", "nice": False}, axis={"format": "~s"})
    ends = [number("low", title="95%: from", **numbers), number("high", title="to", **numbers)]
    about = [number("rows", title="rows", format=",d"), number("value", title="forecast", **numbers), *ends]
    ahead = [{"filter": "isValid(datum.value)"}]
    band = {
        "transform": ahead,
        "mark": {"type": "area", "color": COLOURS[0], "opacity": 0.18},
        "encoding": {
            "y": number("low", title=f"{metric} after training", scale={"zero": False}),
            "y2": {"field": "high"},
        },
    }
    line = {
        "transform": ahead,
        "mark": {"type": "line", "color": COLOURS[0], "strokeDash": [5, 3], "point": {"opacity": 0, "size": 60}},
        "encoding": {"y": number("value"), "tooltip": about},
    }
    points = {
        "transform": [{"filter": "isValid(datum.metric)"}],
        "mark": {"type": "point", "filled": True, "size": 60, "opacity": 1, "color": COLOURS[0]},
        "encoding": {
            "y": number("metric"),
            "tooltip": [number("rows", title="rows", format=",d"), number("metric", title=metric, **numbers)],
        },
    }
    return chart(
        "The metric after training by the number of training rows; dashed, with its interval, what is forecast.",
        height=300,
        params=range_and_shown([]),
        encoding={"x": rows},
        layer=[band, line, points],
    )
