"""The settings of runs beside each other: those that differ, and those that all have in common."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.tools.report.runs import Run

_LONGEST = 300
_ABSENT = "(not recorded)"
_TRIVIAL = {"config": {"output_dir", "resume", "dry_run"}, "launch": {"deepspeed_config", "yaml"}}
"""Different in every run or said elsewhere: the folder is the run's name, and what the yaml decides is in `launch`."""
_SECTIONS = {"config": "setting", "task_options": "task's setting", "launch": "launch", "data": "data"}


def table(runs: Sequence[Run]) -> dict[str, Any]:
    """What run.json and the chosen batching say of each run that has a record; of a comparison's cell its first run.

    Returns:
        `columns`, names of runs; `differing` and `common`, rows of (kind, name, values): one value for each column, or
        in `common` one alone.
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
    limits = ("tokens", "rows")  # of which one decides, and the other is none
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
