"""Decides which charts the page has, under which headings, and which rows each draws."""

from collections.abc import Sequence
from typing import Any

from accel_sft.tools.report import memory, memory_specs, specs
from accel_sft.tools.report.comparison import Comparison, RecordedCell
from accel_sft.tools.report.runs import Run

_GROUPS = {"main": "Curves", "more": "More curves", "ranks": "Memory, CPU and GPU of each rank"}
_MOST_PREDICTED = 12
"""Maximum number of charts of predicted memory; the table beside them lists all predictions."""
_DRAWN_AS_POINTS = 30
"""Maximum number of points of a curve for each point to be marked."""
_ALL_LABELLED = 5
"""Maximum number of points of a chart for all to carry their names; with more, only those on the Pareto front do."""

Chart = dict[str, Any]


def groups(
    every: Sequence[Run],
    cells: Sequence[RecordedCell],
    series: Sequence[str],
    measured: Sequence[Chart],
    comparisons: Sequence[Comparison],
) -> list[dict[str, Any]]:
    """The groups of charts, in the order of the page.

    Args:
        comparisons: those on the page, some of which may have a learning curve.
    Returns:
        the learning curves, which the page shows first, and the other groups; each has its `id`, its `heading`, whether
        it is `folded`, `missing` (the runs that lack what it shows) and `charts`. A chart has an `id`, a `title`, a
        `spec`, and its data under `curves` or `rows`, as `kind` says.
    """
    trained = [run for run in every if run.record]
    no_speed = [run.name for run in trained if not memory.has_speed_and_memory(run.result)]
    no_phases = [run.name for run in trained if not run.result.get("phases")]
    curves = [
        _group(name, heading, [_curves(chart, series) for chart in measured if chart["group"] == name])
        for name, heading in _GROUPS.items()
    ]
    return [
        _group("rows", "Metric by number of training rows", _learnt(comparisons)),
        *curves,
        _group("speed", "Memory against speed", _speed(every, cells, series), no_speed),
        _group("steps", "Step times", _step_times(cells, series)),
        _group("memory", "Memory by phase", [*_startup(every, series), *_predicted(every)], no_phases),
    ]


def _group(name: str, heading: str, charts: list[Chart], missing: Sequence[str] = ()) -> dict[str, Any]:
    for number, chart in enumerate(charts):
        chart["id"] = f"{name}-{number}"
    folded = name in ("more", "ranks")
    return {"id": name, "heading": heading, "folded": folded, "missing": missing, "charts": charts}


def _curves(chart: Chart, series: Sequence[str]) -> Chart:
    few = max(len(curve["steps"]) for curve in chart["curves"]) <= _DRAWN_AS_POINTS
    spec = specs.curves(chart["title"], chart["unit"], series, few)
    return {"kind": "curves", "title": chart["title"], "curves": chart["curves"], "spec": spec}


def _speed(every: Sequence[Run], cells: Sequence[RecordedCell], series: Sequence[str]) -> list[Chart]:
    found = []
    for place in memory.PLACES:
        points = memory.against_speed(every, cells, place)
        for point in points:
            point["series"] = series.index(point["series"])
            point["labelled"] = point["front"] or len(points) <= _ALL_LABELLED
        if points:
            title, spec = f"{place.capitalize()} memory against speed", memory_specs.against_speed(place, series)
            found.append({"kind": "rows", "title": title, "rows": points, "spec": spec})
    return found


def _learnt(comparisons: Sequence[Comparison]) -> list[Chart]:
    return [
        {
            "kind": "rows",
            "title": f"{each.name}: by number of rows",
            "rows": each.learnt,
            "spec": specs.learning_curve(each.main_metric),
        }
        for each in comparisons
        if each.learnt
    ]


def _step_times(cells: Sequence[RecordedCell], series: Sequence[str]) -> list[Chart]:
    rows = [
        {"name": cell.name, "series": series.index(cell.name), "seconds": float(f"{second:.5g}")}
        for cell in cells
        for second in cell.step_seconds
    ]
    spec = specs.step_seconds(len({row["name"] for row in rows}), series)
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
            found.append({"kind": "rows", "title": title, "rows": mine, "spec": memory_specs.startup(what, series)})
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
            measured = [row for row in rows if row["measured"] is not None]
            drawn += [
                {"phase": row["phase"], "component": None, "order": 0, "gib": row["measured"]} for row in measured
            ]
            title = f"{every[run].name}: {place} memory predicted, and measured (mark)"
            spec = memory_specs.predicted(place, every[run].name, names, bool(measured))
            found.append({"kind": "rows", "title": title, "rows": drawn, "spec": spec})
    return found[:_MOST_PREDICTED]
