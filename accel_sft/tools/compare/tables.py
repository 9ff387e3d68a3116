"""Writes a comparison as a table for the terminal, and as CSV with a row for each run."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.tools.compare.findings import in_order, percent, swept
from accel_sft.tools.compare.learning_curve import of_rows
from accel_sft.tools.report.runs import NUMBERS

_TITLES = {
    "median_step_seconds": "s/step",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU",
    "peak_device_memory_gib": "GPU GiB",
    "peak_host_memory_gib": "host GiB",
    "metric_after": "metric",
}
"""Columns of the terminal's table, which has room for few."""
_OF_ROWS = {"metric_after": "metric", "eval_loss_after": "loss"}
_OF_SWEEPS = {**_OF_ROWS, "tokens_per_second": "tokens/s"}


def terminal_table(record: Mapping[str, Any]) -> Table:
    """A table with a row for each setting: the values that vary, then numbers (or a status, if it did not complete)."""
    settings = in_order(record)
    titles = _OF_ROWS if of_rows(record) else _OF_SWEEPS if swept(record) else _TITLES
    titles = {key: title for key, title in titles.items() if any(one["median"][key] is not None for one in settings)}
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    names = record["varied"] or ["launch"]
    for name in names:
        table.add_column(name.replace("_", " "), overflow="fold")
    for key, title in titles.items() or [("", "")]:
        table.add_column(record["main_metric"] if key == "metric_after" else title, justify="right")
        if key == "tokens_per_second":
            table.add_column("spread", justify="right")
            table.add_column("of best", justify="right")
    for setting in settings:
        row = [Text(str(setting["values"].get(name, "-"))) for name in names]
        row[0].append(" *" if setting["disturbed"] and not of_rows(record) else "")  # a finding explains the *
        if setting["status"] != COMPLETE:
            table.add_row(*row, Text(setting["status"]))
            continue
        for key in titles:
            row.append(Text(shown(setting["median"][key]) or "-"))
            if key == "tokens_per_second":
                row += [Text(percent(setting["spread"][key])), Text(percent(setting["ratio_to_best"]))]
        table.add_row(*row)
    return table


def as_csv(record: Mapping[str, Any]) -> str:
    """A row for each run: its setting's values, how it ended, and its numbers."""
    names = list(dict.fromkeys(name for setting in record["settings"] for name in setting["values"]))
    plain = ["round", "status", "reason", "steps", *NUMBERS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", *names, *plain, "disturbed", "folder"])
    for setting in record["settings"]:
        for run in setting["runs"]:
            values = [setting["values"].get(name, "") for name in names]
            about = ["; ".join(run["disturbed"]), run["folder"]]
            writer.writerow([setting["name"], *values, *(run.get(key) for key in plain), *about])
    return text.getvalue()
