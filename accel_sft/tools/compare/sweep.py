"""Ranks the settings of a sweep, which is a comparison that varies what a step computes, by the task's metric."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.options import flag_of
from accel_sft.io.files import is_number, read_object
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.results.resampled import read_measured
from accel_sft.results.significance import Measured, against_best, average, span, verdict, words_for
from accel_sft.tools.compare.learning_curve import of_rows
from accel_sft.tools.compare.measured import EXECUTION, completed

SEED = "seed"
_LISTED = 8
"""Maximum number of settings that the ranking's sentence lists."""


@dataclasses.dataclass(frozen=True)
class SweptSetting:
    """One combination of the swept values, with all of its seeds and launches.

    Attributes:
        name: the swept options with their values.
        entries: the settings of the record with these values, each with a seed and a launch.
    """

    name: str
    entries: Sequence[Mapping[str, Any]]

    @property
    def metrics(self) -> list[float]:
        """The main metric after training, of each entry."""
        return [entry["median"]["metric_after"] for entry in self.entries]

    @property
    def metric(self) -> float:
        return statistics.median(self.metrics)

    @property
    def loss(self) -> float | None:
        """Median of the entries' validation losses after training; None if no entry has one."""
        losses = [loss for entry in self.entries if is_number(loss := entry["median"].get("eval_loss_after"))]
        return statistics.median(losses) if losses else None

    @property
    def spread(self) -> float | None:
        """The range of the metric; None with a single seed, since runs with the same seed train identically."""
        seeds = {str(entry["values"].get(SEED)) for entry in self.entries}
        return max(self.metrics) - min(self.metrics) if len(seeds) > 1 else None

    def __str__(self) -> str:
        low, high = (self.entries[0]["median"].get(key) for key in ("metric_low", "metric_high"))
        about = ""
        if len(self.metrics) > 1:
            about = f" (median of {len(self.metrics)}, {shown(min(self.metrics))} to {shown(max(self.metrics))})"
        elif is_number(low) and is_number(high):
            about = f" (95%: {span(low, high)})"
        loss = "" if self.loss is None else f", validation loss {shown(self.loss)}"
        return f"{self.name}: {shown(self.metric)}{about}{loss}"


def swept(record: Mapping[str, Any]) -> list[str]:
    """Return the varied options, except the seed, that change what a step computes; without any, this is not a
    sweep."""
    return [name for name in record["varied"] if name not in EXECUTION and name != SEED]


def in_order(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the record's settings. A sweep's settings are sorted, best first and without a metric last, unless they
    are numbers of rows."""
    if not swept(record) or of_rows(record):
        return record["settings"]

    def place(entry: Mapping[str, Any]) -> tuple[bool, float, float]:
        metric, loss = (entry["median"].get(key) for key in ("metric_after", "eval_loss_after"))
        return (metric is None, *_rank(record, metric or 0.0, loss))

    return sorted(record["settings"], key=place)


def ranked(record: Mapping[str, Any]) -> list[SweptSetting]:
    """Return the settings that have a metric, the best first; if metrics are equal, the lower validation loss first."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for entry in record["settings"]:
        if entry["status"] == COMPLETE and is_number(entry["median"].get("metric_after")):
            name = ", ".join(f"{flag_of(name)[2:]} {entry['values'].get(name)}" for name in swept(record))
            groups.setdefault(name, []).append(entry)
    settings = [SweptSetting(name, entries) for name, entries in groups.items()]
    return sorted(settings, key=lambda setting: _rank(record, setting.metric, setting.loss))


def _rank(record: Mapping[str, Any], metric: float, loss: float | None) -> tuple[float, float]:
    return (-metric if record.get("higher_is_better", True) else metric, float("inf") if loss is None else loss)


def paired_settings(record: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any] | None]:
    """By name, each setting's test against the best setting on the same examples, averaged over seeds (`against_best`).
    None if untestable: the examples differ or scores are unknown. Empty if this is not a sweep."""
    settings = ranked(record) if swept(record) else []
    by_setting: dict[str, Measured] = {}
    for setting in settings:
        of_seeds = {str(entry["values"].get(SEED)): completed(entry)[0] for entry in setting.entries}
        folders = [RunDir(folder / run["folder"]) for run in of_seeds.values()]
        measured = [read_measured(run_dir, read_object(run_dir.result)) for run_dir in folders]
        together = average([one for one in measured if one])
        if together and None not in measured:
            by_setting[setting.name] = together
    tests = against_best(by_setting, settings[0].name) if settings and settings[0].name in by_setting else {}
    return {setting.name: tests.get(setting.name) for setting in settings[1:]}


def best_settings(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on which setting is best, which settings may be equally good, and what is unknown.

    With fewer than two ranked settings there is at most the sentence that they cannot be ranked.
    """
    metric, settings = record["main_metric"], ranked(record) if swept(record) else []
    if swept(record) and not settings and any(entry["status"] == COMPLETE for entry in record["settings"]):
        yield f"Settings cannot be ranked: no run has {metric} after training; leave out --eval-every off."
    if len(settings) < 2:
        return
    best, others = settings[0], settings[1:]
    tests = {name: test for name, test in record.get("paired", {}).items() if test}
    alike = [other for other in others if _undecided(best, other, tests.get(other.name))]
    if alike:
        which = " and ".join(setting.name for setting in (best, *alike))
        behind = max(abs(best.metric - other.metric) for other in alike)
        yield (
            f"Undecided which is the best by {metric} after training: {which}. They differ by {shown(behind)} at most, "
            "which other seeds or other examples may turn round."
        )
    else:
        yield f"{best.name} is the best by {metric} after training."
    words = words_for(record.get("higher_is_better", True))
    listed = [f"{one}{f', {verdict(test, words)}' if (test := tests.get(one.name)) else ''}" for one in settings]
    more = f"; and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    yield f"By {metric}, the best first: {'; '.join(listed[:_LISTED])}{more}."
    if tests:
        yield f"Each is tested against the best on the same examples, corrected for {len(settings)} settings."
    if any(setting.spread is None for setting in settings):
        yield (
            "A setting was trained with one seed only, so it is not known whether such differences repeat; "
            "--seed 1,2,3 tells, another round of that seed does not."
        )
    for name in swept(record):
        yield from _end(name, best, settings, alike)


def _undecided(best: SweptSetting, other: SweptSetting, test: Mapping[str, Any] | None) -> bool:
    """Whether other seeds or examples might reverse the order of two settings."""
    spreads = [setting.spread for setting in (best, other) if setting.spread is not None]
    by_seeds = abs(best.metric - other.metric) <= max(spreads, default=0.0)
    return by_seeds or (test is not None and test["p"] >= test["level"])


def _end(
    name: str, best: SweptSetting, settings: Sequence[SweptSetting], as_good: Sequence[SweptSetting]
) -> Iterator[str]:
    """Yield a sentence if the option's best value is the largest or smallest that was tried."""
    value, *good = (setting.entries[0]["values"].get(name) for setting in (best, *as_good))
    values = {number for setting in settings if is_number(number := setting.entries[0]["values"].get(name))}
    if len(values) > 1 and {*good} <= {value} and value in (min(values), max(values)):
        yield f"{flag_of(name)} {value} is the end of what was tried: a value beyond it may be better still."
