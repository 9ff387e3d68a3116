"""Vega-Lite specifications of the charts of memory; `specs` has what all charts share."""

from collections.abc import Sequence
from typing import Any

from accel_sft.tools.report.specs import COLOURS, FAINT, INK, SHOWN, chart, of_series, range_and_shown


def against_speed(place: str, series: Sequence[str]) -> dict[str, Any]:
    """Points of memory against speed, and the Pareto front as a step line."""
    memory = {"field": "gib", "type": "quantitative", "title": f"peak {place} memory, largest rank (GiB)"}
    speed = {"field": "tokens_per_second", "type": "quantitative", "title": "training speed (tokens per second)"}
    points = {
        "transform": [SHOWN],
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {
            "color": of_series(series, "colour"),
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
        "transform": [SHOWN, {"filter": "datum.labelled"}],
        "mark": {"type": "text", "dy": -13, "fontSize": 11, "limit": 200},
        "encoding": {"text": {"field": "name", "type": "nominal"}},
    }
    front = {
        "transform": [{"filter": "datum.front"}],
        "mark": {"type": "line", "interpolate": "step-after", "color": FAINT, "strokeDash": [4, 3]},
        "encoding": {"order": {"field": "gib", "type": "quantitative"}},
    }
    scale = {"scale": {"zero": False, "padding": 40}, "axis": {"tickCount": 8, "format": ",.4~g"}}
    return chart(
        f"Peak {place} memory against training speed; diamonds, joined by a dashed line, are the Pareto front.",
        height=300,
        params=range_and_shown(series),
        encoding={"x": {**memory, **scale}, "y": {**speed, **scale}},
        layer=[front, points, labels],
    )


def startup(what: str, series: Sequence[str]) -> dict[str, Any]:
    """A bar for each run at the end of each start-up phase, its ranks stacked."""
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
            "color": of_series(series, "colour"),
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
    return chart(description, params=range_and_shown(series), transform=[SHOWN], **bars)


def predicted(place: str, name: str, components: Sequence[str], has_measured: bool) -> dict[str, Any]:
    """A bar of the predicted components for each phase, with a mark at the measured peak."""
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
    return chart(
        f"Predicted {place} memory of {name} by phase, its components stacked; the dark mark is what was measured.",
        height=320,  # the legend takes a part of it
        encoding={
            "x": {"field": "phase", "type": "nominal", "sort": None, "title": "phase", "axis": {"labelAngle": 0}}
        },
        layer=[stack, measured] if has_measured else [stack],
    )
