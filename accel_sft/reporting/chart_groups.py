"""Which charts the page has, under which headings, and the rows that each draws."""

from collections.abc import Sequence
from typing import Any

from accel_sft.reporting import memory, specs
from accel_sft.reporting.comparison import Cell
from accel_sft.reporting.runs import Run

_GROUPS = {
    "main": "Curves",
    "more": "More curves",
    "ranks": "Memory, CPU and GPU of each rank",
}
_MOST_PREDICTED = 12
"""Charts of predicted memory; the table beside them has all."""

Chart = dict[str, Any]


def groups(
    every: Sequence[Run], cells: Sequence[Cell], series: Sequence[str], measured: Sequence[Chart]
) -> list[dict[str, Any]]:
    """Groups of charts with a heading each, in the order of the page; each chart has an `id`, a `title`, a `kind` that
    names its rows' form for the page's script, and a `spec`."""
    found = []
    for group, heading in _GROUPS.items():
        drawn = [
            {
                "kind": "curves",
                "title": chart["title"],
                "curves": chart["curves"],
                "spec": specs.curves(chart["title"], chart["unit"], series, few=_few(chart)),
            }
            for chart in measured
            if chart["group"] == group
        ]
        found.append({"id": group, "heading": heading, "charts": drawn, "folded": group != "main"})
    places, speed = {run.series: series.index(run.series) for run in every}, []
    places |= {cell.name: series.index(cell.name) for cell in cells}
    for place in memory.PLACES:
        points = memory.against_speed(every, cells, place)
        rows = [{**point, "series": places[point["series"]]} for point in points]
        if rows:
            spec = specs.against_speed(place, series)
            speed.append(
                {"kind": "rows", "title": f"{place.capitalize()} memory against speed", "rows": rows, "spec": spec}
            )
    found.append({"id": "speed", "heading": "Memory against speed", "charts": speed, "folded": False})
    found.append({"id": "steps", "heading": "Step times", "charts": _step_times(cells, series), "folded": False})
    by_phase = [*_startup(every, series), *_predicted(every)]
    found.append({"id": "memory", "heading": "Memory by phase", "charts": by_phase, "folded": False})
    for group in found:
        for number, chart in enumerate(group["charts"]):
            chart["id"] = f"{group['id']}-{number}"
    return found


def _few(chart: Chart) -> bool:
    return max(len(curve["steps"]) for curve in chart["curves"]) <= 30


def _step_times(cells: Sequence[Cell], series: Sequence[str]) -> list[Chart]:
    rows = [
        {"name": cell.name, "series": series.index(cell.name), "seconds": float(f"{second:.5g}")}
        for cell in cells
        for second in cell.step_seconds
    ]
    spec = specs.step_seconds(series)
    return [{"kind": "rows", "title": "Seconds of each counted step", "rows": rows, "spec": spec}] if rows else []


def _startup(every: Sequence[Run], series: Sequence[str]) -> list[Chart]:
    found = []
    rows = memory.startup(every)
    for what in ("host", "device"):
        mine = [
            {
                **row,
                "run": every[row["run"]].name,
                "place": row["run"],
                "series": series.index(every[row["run"]].series),
                "order": order,
            }
            for order, row in enumerate(rows)
            if row["what"].startswith(what)
        ]
        if mine:
            title = f"{what.capitalize()} memory at start-up, ranks stacked"
            found.append({"kind": "rows", "title": title, "rows": mine, "spec": specs.startup(what, series)})
    return found


def _predicted(every: Sequence[Run]) -> list[Chart]:
    by_run: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for row in memory.predicted_and_measured(every):
        by_run.setdefault((row["run"], row["place"]), []).append(row)
    found = []
    for (run, place), rows in by_run.items():
        names = [*dict.fromkeys(name for row in rows for name in row["components"])]
        if names:
            drawn = [
                {"phase": row["phase"], "component": name, "order": names.index(name), "gib": row["components"][name]}
                for row in rows
                for name in row["components"]
            ]
            drawn += [
                {"phase": row["phase"], "component": None, "order": 0, "gib": row["measured"]}
                for row in rows
                if row["measured"] is not None
            ]
            title = f"{every[run].name}: {place} memory predicted, and measured (mark)"
            spec = specs.predicted(place, every[run].name, names)
            found.append({"kind": "rows", "title": title, "rows": drawn, "spec": spec})
    return found[:_MOST_PREDICTED]
