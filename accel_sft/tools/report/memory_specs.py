"""Vega-Lite specifications of the charts of memory; `specs` has what all charts share."""

from collections.abc import Sequence
from typing import Any

from accel_sft.tools.report.specs import COLOURS, FAINT, INK, SHOWN, chart, number, of_series, range_and_shown, word


def against_speed(place: str, series: Sequence[str]) -> dict[str, Any]:
    """Points of memory against speed, and the Pareto front as a step line."""
    memory = number("gib", title=f"peak {place} memory, largest rank (GiB)")
    speed = number("tokens_per_second", title="training speed (tokens per second)")
    points = {
        "transform": [SHOWN],
        "mark": {"type": "point", "filled": True, "size": 110, "opacity": 1},
        "encoding": {
            "color": of_series(series, "colour"),
            "shape": word("front", scale={"domain": [True, False], "range": ["diamond", "circle"]}, legend=None),
            "tooltip": [
                word("name", title="name"),
                number("gib", title="memory (GiB)", format=".4~g"),
                number("tokens_per_second", title="tokens/s", format=",.4~g"),
                word("front", title="on the Pareto front"),
            ],
        },
    }
    labels = {
        "transform": [SHOWN, {"filter": "datum.labelled"}],
        "mark": {"type": "text", "dy": -13, "fontSize": 11, "limit": 200},
        "encoding": {"text": word("name")},
    }
    front = {
        "transform": [{"filter": "datum.front"}],
        "mark": {"type": "line", "interpolate": "step-after", "color": FAINT, "strokeDash": [4, 3]},
        "encoding": {"order": number("gib")},
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
            "x": word("phase", sort=None, title="start-up phase", axis={"labelAngle": 0}),
            "xOffset": word("place"),
            "y": number("gib", stack="zero", title=f"{what} memory (GiB)"),
            "color": of_series(series, "colour"),
            "order": number("order"),
            "fillOpacity": {
                "condition": {"test": "datum.what === 'device, reserved and unused'", "value": 0.4},
                "value": 1,
            },
            "tooltip": [
                word("run", title="run"),
                word("phase", title="phase"),
                word("rank", title="rank"),
                word("what", title="what"),
                number("gib", title="GiB", format=".4~g"),
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
            "y": number("gib", stack="zero", title=f"{place} memory of a rank (GiB)"),
            "color": word("component", scale=scale, title="predicted"),
            "order": number("order"),
            "tooltip": [
                word("phase", title="phase"),
                word("component", title="predicted"),
                number("gib", title="GiB", format=".4~g"),
            ],
        },
    }
    measured = {
        "transform": [{"filter": "datum.component === null"}],
        "mark": {"type": "tick", "thickness": 3, "color": INK},
        "encoding": {
            "y": number("gib"),
            "tooltip": [word("phase", title="phase"), number("gib", title="measured (GiB)", format=".4~g")],
        },
    }
    return chart(
        f"Predicted {place} memory of {name} by phase, its components stacked; the dark mark is what was measured.",
        height=320,  # the legend takes a part of the height
        encoding={"x": word("phase", sort=None, title="phase", axis={"labelAngle": 0})},
        layer=[stack, measured] if has_measured else [stack],
    )
