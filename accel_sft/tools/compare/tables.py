"""Writes a comparison as a table for the terminal, as Markdown, and as CSV with a row for each run."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from accel_sft.io.text import markdown_cell, markdown_table, shown
from accel_sft.tools.compare.learning_curve import of_rows
from accel_sft.tools.compare.measured import NUMBERS
from accel_sft.tools.compare.outcome import COMPLETE
from accel_sft.tools.compare.summary import completed
from accel_sft.tools.compare.sweep import costs_alike, in_order, swept

_TITLES = {
    "median_step_seconds": "s/step",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "peak_device_memory_gib": "GPU GiB",
    "peak_host_memory_gib": "host GiB",
    "metric_after": "metric",
    "eval_loss_after": "loss",
}
"""Columns of the terminal's table, which has room for few."""


def terminal_table(record: Mapping[str, Any]) -> Table:
    """A row for each cell of the comparison: its varied settings, then its numbers, or its status if not complete.

    A sweep's cells are sorted by their metric; of numbers of rows only the metric and the loss are shown.
    """
    cells, titles = in_order(record), [key for key in _TITLES if key != "eval_loss_after"]
    if swept(record):
        titles = ["metric_after", "eval_loss_after", *titles[:-1]]
    if of_rows(record):
        titles = titles[:2]
    elif costs_alike(record):
        titles.remove("tokens_per_second")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    columns = [key for key in titles if any(cell["median"][key] is not None for cell in cells)]
    speed = next((key for key in ("tokens_per_second", "median_step_seconds") if key in columns), None)  # of findings
    names = record["varied"] or ["launch"]
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for key in columns:
        title = record["main_metric"] if key == "metric_after" else _TITLES[key]
        table.add_column(title, justify="right")
        if key == speed:
            table.add_column("spread", justify="right")
        if key == "tokens_per_second":
            table.add_column("of best", justify="right")
    if not columns:
        table.add_column("")
    for cell in cells:
        row = [Text(str(cell["settings"].get(name, "-"))) for name in names]
        row[0].append(" *" if cell["disturbed"] and not of_rows(record) else "")  # the findings explain it
        if cell["status"] != COMPLETE:
            table.add_row(*row, Text(cell["status"]))
            continue
        for key in columns:
            row.append(Text(shown(cell["median"][key]) or "-"))
            if key == speed:
                row.append(Text(percent(cell["spread"][key])))
            if key == "tokens_per_second":
                row.append(Text("-" if cell["ratio_to_best"] is None else f"{cell['ratio_to_best']:.2f}"))
        table.add_row(*row)
    return table


def markdown(record: Mapping[str, Any]) -> str:
    """The comparison as Markdown: findings, every number of every cell, what differs, and the environment."""
    cells = in_order(record)
    parts = [f"# Comparison: {markdown_cell(record['task'])}", f"```text\n{record['command']}\n```", "## Findings"]
    parts += ["\n".join(f"- {markdown_cell(line)}" for line in record["findings"]), "## Cells"]
    keys = [key for key in NUMBERS if any(cell["median"][key] is not None for cell in cells)]
    titles = [NUMBERS[key] + (f": {record['main_metric']}" if key == "metric_after" else "") for key in keys]
    rows = []
    for cell in cells:
        told = cell["status"] if cell["status"] == COMPLETE else f"{cell['status']}: {cell['reason']}"
        runs = f"{len(completed(cell))} of {len(cell['runs'])}"
        runs += "".join(f", round {number} disturbed" for number in cell["disturbed"])
        ratio = "" if cell["ratio_to_best"] is None else f"{cell['ratio_to_best']:.2f}"
        rows.append([cell["name"], told, runs, ratio, *(_with_spread(cell, key) for key in keys)])
    header = ["cell", "status", "completed runs", "tokens/s relative to the best", *titles]
    parts.append(markdown_table(header, rows))
    parts.append("Numbers are medians over the rounds; in brackets: largest minus smallest, as a share of the median.")
    rows = [[cell["name"], *peak] for cell in cells for run in completed(cell)[:1] for peak in _predicted_peaks(run)]
    if rows:
        titles = ["cell", "where", "predicted", "measured", "error"]
        parts += ["## Predicted and measured peak memory (GiB, the first completed run)", markdown_table(titles, rows)]
    rows = [[cell["name"], *phase] for cell in cells for run in completed(cell)[:1] for phase in _phases(run)]
    if rows:
        titles = ["cell", "phase", "host: process", "device: allocated", "device: peak", "device: reserved"]
        which = "GiB, the largest rank of the first completed run"
        parts += [f"## Memory at the end of each start-up phase ({which})", markdown_table(titles, rows)]
    parts.append("## What differs between the cells")
    for kind, differing in record["differences"].items():
        rows = [[name, _told(values)] for name, values in differing.items()]
        parts.append(markdown_table([kind, "by cell or run"], rows) if rows else f"In the {kind}: nothing.")
    about = [[key, _told(value)] for key, value in record["environment"].items() if key != "packages"]
    parts += ["## Environment", markdown_table(["", ""], about), "All packages are in `comparison.json`."]
    return "\n\n".join(parts) + "\n"


def as_csv(record: Mapping[str, Any]) -> str:
    """A row for each run: its cell and settings, how it ended, and its numbers."""
    names = list(dict.fromkeys(name for cell in record["cells"] for name in cell["settings"]))
    plain = ["round", "status", "reason", "steps", *NUMBERS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["cell", *names, *plain, "load_before", "disturbed", "folder"])
    for cell in record["cells"]:
        for run in cell["runs"]:
            given = [cell["settings"].get(name, "") for name in names]
            about = [run["environment"].get("load_before"), "; ".join(run.get("disturbed") or []), run["folder"]]
            writer.writerow([cell["name"], *given, *(run.get(key) for key in plain), *about])
    return text.getvalue()


def percent(share: float | None) -> str:
    """A share as text in percent; "-" for None."""
    return "-" if share is None else f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"


def _phases(run: Mapping[str, Any]) -> list[list[str]]:
    keys = ("process_memory_gib", "device_allocated_gib", "device_peak_gib", "device_reserved_gib")
    return [[phase["phase"], *(shown(phase.get(key)) or "-" for key in keys)] for phase in run["phases"]]


def _with_spread(cell: Mapping[str, Any], key: str) -> str:
    value, spread = cell["median"][key], cell["spread"][key]
    if value is None:
        return ""
    text = percent(value) if key == "step_seconds_spread" else shown(value)
    return text if spread is None else f"{text} ({percent(spread)})"


def _told(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_told(part)}" for name, part in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_told, value)) or "-"
    return shown(value) or "-"


def predicted_peaks(run: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """The largest predicted and the largest measured GiB over a run's phases, for "device" and "host" if recorded."""
    found = {}
    for place, phases in (run.get("memory") or {}).items():
        largest = (max(phase[key] for phase in phases.values()) for key in ("predicted_gib", "measured_gib"))
        found[place] = next(largest), next(largest)
    return found


def _predicted_peaks(run: Mapping[str, Any]) -> list[list[str]]:
    peaks = predicted_peaks(run)
    return [[place, shown(a), shown(b), f"{100 * (a - b) / b:+.0f}%"] for place, (a, b) in peaks.items()]
