"""The charts as Vega-Lite specifications. Data, the runs that are shown and the range of steps come from the page.

Colours are the page's own variables, so that a chart follows light, dark and print without being drawn again.
"""

from collections.abc import Sequence
from typing import Any

INK, FAINT, GRID = "var(--ink)", "var(--faint)", "var(--line)"
COLOURS = tuple(f"var(--c{number})" for number in range(1, 7))
DASHES = ((1, 0), (6, 3), (2, 2), (8, 3, 2, 3))
"""A seventh series has the first one's colour and another line."""

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
        "titleFontWeight": "normal",
        "labelOverlap": "greedy",
        "labelSeparation": 8,
    },
    "legend": {"labelColor": INK, "titleColor": INK, "orient": "bottom", "columns": 4, "labelFontSize": 11},
    "text": {"color": INK},
}


def look(series: Sequence[str]) -> list[dict[str, Any]]:
    """Colour and dash of each series."""
    return [
        {"name": name, "colour": COLOURS[place % len(COLOURS)], "dash": DASHES[place // len(COLOURS) % len(DASHES)]}
        for place, name in enumerate(series)
    ]


def _chart(description: str, **parts: Any) -> dict[str, Any]:
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v6.json",
        "description": description,
        "width": "container",
        "height": 220,
        "autosize": {"type": "fit", "contains": "padding"},
        "data": {"name": "rows"},
        **parts,
    }


def _of_series(series: Sequence[str], key: str) -> dict[str, Any]:
    values = [each[key] for each in look(series)]
    scale = {"domain": [*range(len(series))], "range": [[*value] if key == "dash" else value for value in values]}
    return {"field": "series", "type": "nominal", "scale": scale, "legend": None}


_SHOWN = {"filter": "indexof(shown, datum.series) >= 0"}


def curves(title: str, unit: str, series: Sequence[str], few: bool) -> dict[str, Any]:
    """Lines over steps or minutes (`x`), a line for each run and rank; a drag selects the range `brush`.

    Args:
        few: whether each curve is a handful of points, which are then drawn.
    """
    x = {"field": "x", "type": "quantitative", "title": "step", "axis": {"tickMinStep": 1}}
    x["scale"] = {"zero": False, "nice": False, "domainMin": {"expr": "low"}, "domainMax": {"expr": "high"}}
    y = {"field": "value", "type": "quantitative", "title": unit, "scale": {"zero": False}}
    y["axis"] = {"format": ",.6~g"}
    tooltip = [
        {"field": "run", "type": "nominal", "title": "run"},
        {"field": "step", "type": "quantitative", "title": "step", "format": ",d"},
        {"field": "value", "type": "quantitative", "title": unit, "format": ".5~g"},
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
    by_line = {"groupby": ["line"], "sort": [{"field": "x"}]}
    neighbours = [{"op": "lag", "field": "x", "as": "before"}, {"op": "lead", "field": "x", "as": "after"}]
    within = "(low === null || datum.x >= low || datum.after >= low)"  # with the neighbours, to which lines lead
    within += " && (high === null || datum.x <= high || (datum.before !== null && datum.before <= high))"
    return _chart(
        f"{title} over the steps of training, a line for each run; vertical axis: {unit}.",
        params=_range_and_shown(series),
        transform=[_SHOWN, {"window": neighbours, **by_line}, {"filter": within}],
        encoding={"x": x, "y": y},
        layer=[line, point],
    )


def _range_and_shown(series: Sequence[str]) -> list[dict[str, Any]]:
    every = {"name": "shown", "value": [*range(len(series))]}
    return [every, {"name": "low", "value": None}, {"name": "high", "value": None}]


def against_speed(place: str, series: Sequence[str]) -> dict[str, Any]:
    """Points of memory and speed, and the step line of the Pareto front."""
    memory = {"field": "gib", "type": "quantitative", "title": f"peak {place} memory, largest rank (GiB)"}
    speed = {"field": "tokens_per_second", "type": "quantitative", "title": "training speed (tokens per second)"}
    points = {
        "transform": [_SHOWN],
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {
            "color": _of_series(series, "colour"),
            "shape": {
                "field": "front",
                "type": "nominal",
                "scale": {"domain": [True, False], "range": ["diamond", "circle"]},
                "legend": None,
            },
            "tooltip": [
                {"field": "name", "type": "nominal", "title": "name"},
                {"field": "gib", "type": "quantitative", "title": "memory (GiB)", "format": ".4~g"},
                {"field": "tokens_per_second", "type": "quantitative", "title": "tokens/s", "format": ",.4~g"},
                {"field": "front", "type": "nominal", "title": "on the Pareto front"},
            ],
        },
    }
    labels = {
        "transform": [_SHOWN, {"filter": "datum.labelled"}],
        "mark": {"type": "text", "dy": -13, "fontSize": 11, "limit": 200},
        "encoding": {"text": {"field": "name", "type": "nominal"}},
    }
    front = {
        "transform": [{"filter": "datum.front"}],
        "mark": {"type": "line", "interpolate": "step-after", "color": FAINT, "strokeDash": [4, 3]},
        "encoding": {"order": {"field": "gib", "type": "quantitative"}},
    }
    scale = {"scale": {"zero": False, "padding": 40}, "axis": {"tickCount": 8, "format": ",.4~g"}}
    return _chart(
        f"Peak {place} memory against training speed; diamonds, joined by a dashed line, are the Pareto front.",
        height=300,
        params=_range_and_shown(series),
        encoding={"x": {**memory, **scale}, "y": {**speed, **scale}},
        layer=[front, points, labels],
    )


def startup(what: str, series: Sequence[str]) -> dict[str, Any]:
    """Bars of each run at the end of each start-up phase, its ranks stacked."""
    bars = {
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1},
        "encoding": {
            "x": {
                "field": "phase",
                "type": "nominal",
                "sort": None,
                "title": "start-up phase",
                "axis": {"labelAngle": 0},
            },
            "xOffset": {"field": "place", "type": "nominal"},
            "y": {
                "field": "gib",
                "type": "quantitative",
                "stack": "zero",
                "title": f"{what} memory (GiB)",
            },
            "color": _of_series(series, "colour"),
            "order": {"field": "order", "type": "quantitative"},
            "fillOpacity": {
                "condition": {"test": "datum.what === 'device, reserved and unused'", "value": 0.4},
                "value": 1,
            },
            "tooltip": [
                {"field": "run", "type": "nominal", "title": "run"},
                {"field": "phase", "type": "nominal", "title": "phase"},
                {"field": "rank", "type": "nominal", "title": "rank"},
                {"field": "what", "type": "nominal", "title": "what"},
                {"field": "gib", "type": "quantitative", "title": "GiB", "format": ".4~g"},
            ],
        },
    }
    description = f"{what.capitalize()} memory at the end of each start-up phase, the ranks of a run stacked."
    return _chart(description, params=_range_and_shown(series), transform=[_SHOWN], **bars)


def predicted(place: str, name: str, components: Sequence[str], has_measured: bool) -> dict[str, Any]:
    """Bars of the predicted components of each phase, and a mark at what was measured."""
    scale = {"domain": [*components], "range": [(*COLOURS, FAINT)[i % 7] for i in range(len(components))]}
    stack = {
        "transform": [{"filter": "datum.component !== null"}],
        "mark": {"type": "bar", "stroke": "var(--paper)", "strokeWidth": 1},
        "encoding": {
            "y": {"field": "gib", "type": "quantitative", "stack": "zero", "title": f"{place} memory of a rank (GiB)"},
            "color": {"field": "component", "type": "nominal", "scale": scale, "title": "predicted"},
            "order": {"field": "order", "type": "quantitative"},
            "tooltip": [
                {"field": "phase", "type": "nominal", "title": "phase"},
                {"field": "component", "type": "nominal", "title": "predicted"},
                {"field": "gib", "type": "quantitative", "title": "GiB", "format": ".4~g"},
            ],
        },
    }
    measured = {
        "transform": [{"filter": "datum.component === null"}],
        "mark": {"type": "tick", "thickness": 3, "color": INK},
        "encoding": {
            "y": {"field": "gib", "type": "quantitative"},
            "tooltip": [
                {"field": "phase", "type": "nominal", "title": "phase"},
                {"field": "gib", "type": "quantitative", "title": "measured (GiB)", "format": ".4~g"},
            ],
        },
    }
    return _chart(
        f"Predicted {place} memory of {name} by phase, its components stacked; the dark mark is what was measured.",
        encoding={
            "x": {"field": "phase", "type": "nominal", "sort": None, "title": "phase", "axis": {"labelAngle": 0}}
        },
        layer=[stack, measured] if has_measured else [stack],
    )


def step_seconds(cells: int, series: Sequence[str]) -> dict[str, Any]:
    """Box plots of each cell's counted steps."""
    boxes = {
        "mark": {
            "type": "boxplot",
            "extent": "min-max",
            "size": 13,
            "median": {"color": "var(--paper)"},
            "rule": {"color": FAINT},
        },
        "encoding": {
            "x": {"field": "seconds", "type": "quantitative", "title": "step time (seconds)", "scale": {"zero": False}},
            "y": {"field": "name", "type": "nominal", "sort": None, "title": "cell", "axis": {"labelLimit": 180}},
            "color": _of_series(series, "colour"),
        },
    }
    return _chart(
        "Seconds of each counted step, a box plot for each cell of the comparison.",
        height=60 + 26 * cells,
        params=_range_and_shown(series),
        transform=[_SHOWN],
        layer=[boxes],
    )
