"""Tabulates the settings of runs: those that differ, and those that all runs have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.tools.report.runs import Run

_LONGEST = 300
"""Maximum number of characters of a value in the table."""
_ABSENT = "(not recorded)"
_TRIVIAL = {"config": {"output_dir", "resume", "dry_run"}, "launch": {"deepspeed_config", "yaml"}}
"""Keys left out of the table, since every run has another value or the page shows it elsewhere.

The folder is the run's name, and the effects of the launch file are in `launch`.
"""
_SECTIONS = {"config": "setting", "task_options": "task's setting", "launch": "launch", "data": "data"}


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """Return settings and chosen batching of each run that has a run.json; a comparison's cell shows its first run.

    Returns:
        `columns`, the names of the runs; `differing`, rows of (kind, name, a value for each column); `common`, rows of
        (kind, name, the value that all share).
    """
    columns: dict[str, Run] = {}
    for run in runs:
        if run.record:
            columns.setdefault(run.series, run)
    found = [_flat(run) for run in columns.values()]
    keys = dict.fromkeys(key for settings in found for key in settings)
    differing, common = [], []
    for kind, name in keys:
        values = [settings.get((kind, name), _ABSENT) for settings in found]
        if len(set(values)) > 1:
            differing.append((kind, name, values))
        else:
            common.append((kind, name, values[0]))
    return {"columns": [*columns], "differing": differing, "common": common}


def _flat(run: Run) -> dict[tuple[str, str], str]:
    flat: dict[tuple[str, str], str] = {}
    for section, kind in _SECTIONS.items():
        values = run.record.get(section)
        if isinstance(values, Mapping):
            kept = {key: value for key, value in values.items() if key not in _TRIVIAL.get(section, ())}
            _flatten(flat, kind, "", kept)
    for key in ("data_sha256", "task_code"):
        if key in run.record:
            flat["data", key] = _shown(run.record[key])[:12]
    batching = run.section("batching")
    limits = ("tokens", "rows")  # only one of the two is a limit
    unlimited = {key: "no limit" for key in limits if batching.get(key) in (None, 2**31)}
    _flatten(flat, "chosen batching", "", {**batching, **unlimited})
    return flat


def _flatten(flat: dict[tuple[str, str], str], kind: str, prefix: str, values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if isinstance(value, Mapping):
            _flatten(flat, kind, f"{prefix}{key}.", value)
        else:
            flat[kind, _shown(f"{prefix}{key}")] = _shown(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text) - _LONGEST:,} more characters)"
