"""Gathers what the page shows from runs and comparisons, and renders it as one file that needs no network."""

import base64
import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

import accel_sft
from accel_sft.io.files import is_number, json_safe
from accel_sft.io.text import shown
from accel_sft.results.labels import label_tables
from accel_sft.tools.report import answers, charts, tables
from accel_sft.tools.report.runs import NUMBERS, Comparison, Run

_FOLDER = Path(__file__).parent
_SCRIPTS = ("vega/vega.min.js", "vega/vega-lite.min.js", "vega/vega-embed.min.js", "page/answers.js", "page/charts.js")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""A lone surrogate, which JSON can escape but UTF-8 cannot encode."""
_SOURCE_MAP = re.compile(r"//# sourceMappingURL=\S+")
"""A script's reference to a file that a browser's inspector would fetch."""


def render(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    """The page as HTML, with these runs and the runs of these comparisons."""
    every = [*runs, *(run for comparison in comparisons for run in comparison.runs)]
    names = [setting["name"] for comparison in comparisons for setting in comparison.settings]
    series = [*dict.fromkeys([*(run.series for run in every), *names])]
    groups = charts.groups(every, series, comparisons)
    data: dict[str, Any] = {
        "series": charts.look(series),
        "runs": [
            {"name": run.name, "series": series.index(run.series), "main": run.result.get("main_metric")}
            for run in every
        ],
        "charts": [chart for group in groups for chart in group["charts"]],
        "config": charts.CONFIG,
        "answers": answers.collect(every),
    }
    scripts = [_SOURCE_MAP.sub("", (_FOLDER / name).read_text(encoding="utf-8")) for name in _SCRIPTS]
    context: dict[str, Any] = {
        "title": _title(runs, comparisons),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "version": accel_sft.__version__,
        "runs": every,
        "comparisons": [(comparison, _columns(comparison)) for comparison in comparisons],
        "series": charts.look(series),
        "groups": groups,
        "rows": [tables.run_row(run) for run in every],
        "scores": tables.scores(every),
        "ranked": tables.against_best_run(every),
        "labels": [(run.name, *table) for run in every for table in label_tables(run.result.get("labels"))],
        "settings": tables.settings(every),
        "policy": _policy(scripts),
        "scripts": scripts,
        "style": (_FOLDER / "page" / "page.css").read_text(encoding="utf-8"),
        "has_answers": bool(data["answers"]["evaluations"]),
        # a `<` in the data must not end the script element
        "data": json.dumps(json_safe(data), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", _template().render(context))


def _columns(comparison: Comparison) -> dict[str, str]:
    """The titles of the numbers that at least one setting has, by key."""
    medians = [setting["median"] for setting in comparison.settings]
    return {key: title for key, title in NUMBERS.items() if any(is_number(median.get(key)) for median in medians)}


def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(_FOLDER / "page")
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"number": lambda value: shown(value) or "–", "clock": _clock, "duration": _duration}
    return environment.get_template("page.html.jinja")


def _policy(scripts: Sequence[str]) -> str:
    """The page's Content-Security-Policy: only its own scripts run, whatever the data contains; nothing is fetched."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; form-action 'none'"


def _title(runs: Sequence[Run], comparisons: Sequence[Comparison]) -> str:
    names = [comparison.name for comparison in comparisons] + [run.name for run in runs]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _clock(seconds: float | None) -> str:
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _duration(seconds: Any) -> str:
    if not is_number(seconds):
        return ""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.1f} s" if seconds < 100 else f"{minutes:.1f} min" if minutes < 100 else f"{hours:.1f} h"
