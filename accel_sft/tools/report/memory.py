"""Gathers the memory of runs for charts: against speed with a Pareto front, by phase, and predicted beside measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.io.files import mapping
from accel_sft.memory.estimate import COMPONENTS, PHASES
from accel_sft.tools.report.comparison import RecordedCell
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.run_report import is_number

PLACES = {"device": "peak_device_memory_gib", "host": "peak_host_memory_gib"}


def against_speed(runs: Sequence[Run], cells: Sequence[RecordedCell], place: str) -> list[dict[str, Any]]:
    """Return a point for each run, or for the medians of a comparison's cell, whose memory and speed are both known.

    Args:
        place: the memory whose peak is meant, on the rank with the largest peak: "device" or "host".
    Returns:
        `name`, `series`, `gib`, `tokens_per_second`, and whether the point is on the Pareto `front`.
    """
    named = [(run.name, run.series, run.result) for run in runs if run.series not in {cell.name for cell in cells}]
    named += [(cell.name, cell.name, cell.median) for cell in cells]
    key = PLACES[place]
    points = [
        {"name": name, "series": series, "gib": values[key], "tokens_per_second": values["tokens_per_second"]}
        for name, series, values in named
        if is_number(values.get(key)) and is_number(values.get("tokens_per_second"))
    ]
    front = pareto_front([(point["gib"], point["tokens_per_second"]) for point in points])
    return [{**point, "front": number in front} for number, point in enumerate(points)]


def has_speed_and_memory(values: Mapping[str, Any]) -> bool:
    return is_number(values.get("tokens_per_second")) and any(is_number(values.get(key)) for key in PLACES.values())


def pareto_front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of the (memory, speed) points that no other point beats.

    A point is beaten by one that is no worse in memory and speed and better in one of them.
    """
    return {
        place
        for place, (memory, speed) in enumerate(points)
        if not any(m <= memory and s >= speed and (m, s) != (memory, speed) for m, s in points)
    }


def startup(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return rows with each rank's memory at the end of each start-up phase.

    Returns:
        `run` (its index), `phase`, `rank`, `what` ("host", "device, allocated" or "device, reserved and unused") and
        `gib`.
    """
    rows = []
    for place, run in enumerate(runs):
        phases = run.result.get("phases")
        for row in phases if isinstance(phases, list) else ():
            if not isinstance(row, dict):
                continue
            allocated, reserved = row.get("device_allocated_gib"), row.get("device_reserved_gib")
            unused = reserved - allocated if is_number(reserved) and is_number(allocated) else None
            found = {
                "host": row.get("process_memory_gib"),
                "device, allocated": allocated,
                "device, reserved and unused": unused,
            }
            rows += [
                {"run": place, "phase": str(row.get("phase")), "rank": row.get("rank"), "what": what, "gib": gib}
                for what, gib in found.items()
                if is_number(gib)
            ]
    return rows


def predicted_and_measured(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run, place and phase with a prediction or a measurement.

    Returns:
        `run` (its index), `place` ("device" or "host"), `phase`, `components` (GiB by name, empty without a prediction)
        and `predicted` and `measured` GiB, one of which may be None.
    """
    rows = []
    for number, run in enumerate(runs):
        measured = run.section("memory_by_phase")
        for place, key in PLACES.items():
            predicted = run.section("memory", place)
            for phase in sorted({*predicted, *measured}, key=_in_order):
                pair = mapping(predicted.get(phase))
                total = pair.get("predicted_gib")
                peak = pair.get("measured_gib", mapping(measured.get(phase)).get(key))
                if is_number(total) or is_number(peak):
                    found = {
                        "components": _components(pair.get("components_gib")),
                        "predicted": total if is_number(total) else None,
                        "measured": peak if is_number(peak) else None,
                    }
                    rows.append({"run": number, "place": place, "phase": str(phase), **found})
    return rows


def _in_order(phase: str) -> tuple[int, str]:
    return (PHASES.index(phase) if phase in PHASES else len(PHASES), phase)


def _components(predicted: Any) -> dict[str, float]:
    """A phase's predicted GiB by component, in the order in which they are stacked."""
    found = mapping(predicted)
    names = sorted(found, key=lambda name: COMPONENTS.index(name) if name in COMPONENTS else len(COMPONENTS))
    return {str(name): found[name] for name in names if is_number(found[name])}
