"""Gathers what the page shows from runs and comparisons, and renders it as one file that needs no network."""

import base64
import functools
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import accel_sft
from accel_sft.io.files import json_safe, mapping
from accel_sft.io.text import one_line, shown
from accel_sft.tools.report import answers, chart_groups, curves, memory, settings, specs
from accel_sft.tools.report.comparison import Comparison
from accel_sft.tools.report.events import system_readings
from accel_sft.tools.report.paired import paired_runs
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.labels import label_tables
from accel_sft.tracking.metrics_file import mean_mfu
from accel_sft.tracking.run_report import comparison_rows, is_number, sources_text

MOST_BYTES = 1_950_000
"""Size in bytes up to which answers fill a page."""
MOST_CHARTS, MOST_ROWS = 60, 300
"""Maximum number of charts of curves on a page (losses and the main metric come first), and of rows in its tables."""
_FEWEST_ANSWER_BYTES = 100_000
"""Bytes that answers may always take, even if the curves of very many runs fill the page."""
_FOLDER = Path(__file__).parent
_SCRIPTS = ("vega/vega.min.js", "vega/vega-lite.min.js", "vega/vega-embed.min.js", "page/answers.js", "page/charts.js")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which JSON can escape but UTF-8 cannot encode."""
_SOURCE_MAP = re.compile(r"//# sourceMappingURL=\S+")
"""A script's reference to a file that a browser's inspector would fetch."""


def render(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> tuple[str, list[str]]:
    """Return the page as HTML, and sentences on what it leaves out.

    Args:
        runs: the runs that the user named; the runs of `comparisons` are added.
    """
    every = [*runs, *(run for comparison in comparisons for run in comparison.runs)]
    cells = [cell for comparison in comparisons for cell in comparison.cells]
    series = [*dict.fromkeys([*(run.series for run in every), *(cell.name for cell in cells)])]
    measured = curves.charts(every, [system_readings(run) for run in every])
    undrawn, scores, chosen = measured[MOST_CHARTS:], _scores(every), settings.table(every)
    measured = measured[:MOST_CHARTS]
    groups = chart_groups.groups(every, cells, series, measured, comparisons)
    data: dict[str, Any] = {
        "series": specs.look(series),
        "runs": [
            {"name": run.name, "series": series.index(run.series), "main": _main_metric(run, every)} for run in every
        ],
        "minutes": [curves.training_minutes(run) for run in every],
        "charts": [chart for group in groups for chart in group["charts"]],
        "config": specs.CONFIG,
    }
    template, parts = _template(), _parts()
    context: dict[str, Any] = {
        "title": _title(runs, comparisons),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": accel_sft.__version__,
        "runs": every,
        "comparisons": comparisons,
        "series": specs.look(series),
        "groups": groups,
        "rows": [_row(run) for run in every],
        "scores": {**scores, "rows": scores["rows"][:MOST_ROWS]},
        "ranked": paired_runs(every),
        "labels": [(run.name, *table) for run in every for table in label_tables(run.result.get("labels"))],
        "settings": {**chosen, **{kind: chosen[kind][:MOST_ROWS] for kind in ("differing", "common")}},
        "predicted": memory.predicted_and_measured(every),
        "policy": _policy(parts["scripts"]),
        "smooth": any(chart["thinned"] for chart in measured),
        "left_out": [],
        "has_answers": True,
        **parts,
    }
    taken = len(_whole(template, context, data).encode())
    data["answers"], answers_left_out = answers.collect(every, max(MOST_BYTES - taken, _FEWEST_ANSWER_BYTES))
    context["left_out"] = [*curves.left_out(measured), *_too_many(undrawn, scores, chosen), *answers_left_out]
    context["has_answers"] = bool(data["answers"]["evaluations"])
    return _whole(template, context, data), context["left_out"]


def _too_many(undrawn: Sequence[dict], scores: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Return sentences on the charts and table rows for which a page has no room."""
    said = []
    if undrawn:
        said.append(f"{len(undrawn):,} more things were measured, {one_line(undrawn[0]['key'], 80)} the first of them.")
    counts = {"metrics": len(scores["rows"]), "settings": max(len(settings["differing"]), len(settings["common"]))}
    said += [
        f"{n:,} {what} are too many for a table: {MOST_ROWS} are shown." for what, n in counts.items() if n > MOST_ROWS
    ]
    return [*said, "metrics.jsonl, result.json and run.json have all."] if said else []


def _whole(template: jinja2.Template, context: dict[str, Any], data: dict[str, Any]) -> str:
    text = json.dumps(json_safe(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", template.render(data=text, **context))


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(_FOLDER / "page")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": _number, "clock": _clock, "duration": _duration}
    return environment.get_template("page.html.jinja")


@functools.cache
def _parts() -> dict[str, Any]:
    scripts = [_SOURCE_MAP.sub("", (_FOLDER / name).read_text(encoding="utf-8")) for name in _SCRIPTS]
    return {"scripts": scripts, "style": (_FOLDER / "page" / "page.css").read_text(encoding="utf-8")}


def _policy(scripts: Sequence[str]) -> str:
    """The page's Content-Security-Policy: only its own scripts run, whatever the data contains; nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"


def _title(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    names = [comparison.name for comparison in comparisons] + [run.name for run in runs]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _main_metric(run: Run, every: Sequence[Run]) -> str | None:
    """The main metric of the run's task, from the run's own result or else from another run of that task."""
    same = (each for each in (run, *every) if each.task == run.task)
    return next((str(each.result["main_metric"]) for each in same if each.result.get("main_metric")), None)


def _row(run: Run) -> dict[str, Any]:
    """A run's row in the table of runs: numbers from result.json, or from its steps so far if it has not ended."""
    seconds = [row["seconds"] for row in run.steps if is_number(row.get("seconds"))]
    tokens = [row["tokens"] for row in run.steps if is_number(row.get("tokens"))]
    so_far = {
        "train_seconds": sum(seconds) if seconds else None,
        "tokens_per_second": sum(tokens) / sum(seconds) if tokens and sum(seconds) else None,
        "mfu": mean_mfu(run.steps),
    }
    config = mapping(run.record.get("config"))
    return {
        "name": run.name,
        "mixed": one_line(sources_text(run.result.get("sources")), 600),
        "model": config.get("init_from") or config.get("model") or run.result.get("model"),
        "launch": _launch(mapping(run.record.get("launch"))),
        "step": run.last_step,
        "total_steps": run.record.get("total_steps"),
        **{key: run.result.get(key, value) for key, value in so_far.items()},
        "peak_device_memory_gib": run.result.get("peak_device_memory_gib"),
        "peak_host_memory_gib": run.result.get("peak_host_memory_gib"),
    }


def _scores(every: Sequence[Run]) -> dict[str, Any]:
    """Return the first and the last evaluation of each run that has evaluations.

    Returns:
        `columns`, the names of those runs; `rows`, each a label and a (base, tuned, change) for each column.
    """
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    for run in every:
        before, after = run.section("before"), run.section("after")
        if not after and run.evaluations:
            before, after = ({k: n for k, n in run.evaluations[place].items() if k != "step"} for place in (0, -1))
            first, last = (run.evaluations[place]["step"] for place in (0, -1))
            if first == last:  # it is of the base model or of the tuned one, and there is no change to show
                before, after = (before, {}) if first == 0 else ({}, after)
        if lines := comparison_rows(before, after, run.result):
            found[run.name] = {one_line(label, 80): (base, tuned, change) for label, base, tuned, change in lines}
    labels = dict.fromkeys(label for lines in found.values() for label in lines)
    rows = [(label, [lines.get(label, ("", "", "")) for lines in found.values()]) for label in labels]
    return {"columns": [*found], "rows": rows}


def _launch(launch: dict[str, Any]) -> str:
    processes, stage = launch.get("processes"), launch.get("zero_stage")
    parts = [str(launch.get("backend") or "")]
    parts += [f"ZeRO {stage}"] if stage is not None else []
    parts += [f"{processes} process" + ("" if processes == 1 else "es")] if processes is not None else []
    precision = str(launch.get("precision") or "")
    return ", ".join(filter(None, [*parts, "float32" if precision == "no" else precision]))


def _number(value: Any) -> str:
    """A number as text; a dash if it is not recorded."""
    return shown(value) or "–"


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(seconds: Any) -> str:
    if not is_number(seconds):
        return ""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes:.1f} min" if minutes < 100 else f"{hours:.1f} h"
