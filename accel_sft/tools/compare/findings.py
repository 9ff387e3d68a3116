"""Ranks a comparison's settings, and says which is best or fastest, what others cost, and what disturbed runs."""

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
from accel_sft.tools.compare import learning_curve
from accel_sft.tools.compare.measured import EXECUTION, completed

Setting = Mapping[str, Any]
"""An entry of the record's `settings`."""
SPEED = "tokens_per_second"
SEED = "seed"
_MEMORY = {"peak_device_memory_gib": "on a GPU", "host_memory_all_ranks_gib": "of host memory"}
_FACTS = ("device", "cores", "platform", "versions", "data")
"""Conditions that should be the same for all runs, by their keys in a run's `environment`."""
_LISTED = 8
"""Maximum number of settings that the ranking's sentence lists."""


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence or two for each finding. For a sweep, these are its best settings, and speeds if launches or
    layouts vary; for numbers of rows, a learning curve. Speeds are in tokens/s, because batch sizes may differ."""
    settings = record["settings"]
    if learnt := [*learning_curve.in_sentences(record)]:
        return [*learnt, *_failures(settings)]
    lines = [*_best_settings(record)]
    if not swept(record) or EXECUTION & {*record["varied"]}:
        lines += _speed_and_memory(settings)
    return [*lines, *_disturbed(settings), *_failures(settings), *_learning(settings), *_surroundings(settings)]


@dataclasses.dataclass(frozen=True)
class SweptSetting:
    """One combination of the swept values: its name, and the record's entries with these values (one for each seed and
    launch)."""

    name: str
    entries: Sequence[Setting]

    @property
    def metrics(self) -> list[float]:
        """Each entry's main metric after training."""
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
        """Range of the entries' metrics; None with one seed, because runs with the same seed train identically."""
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
    """The varied options, except the seed, that change what a step computes; empty if the comparison is no sweep."""
    return [name for name in record["varied"] if name not in EXECUTION and name != SEED]


def in_order(record: Mapping[str, Any]) -> list[Setting]:
    """Return the record's settings. In a sweep, the best setting comes first and settings without a metric come last;
    but settings that differ in the number of rows keep their order."""
    if not swept(record) or learning_curve.of_rows(record):
        return record["settings"]

    def place(entry: Setting) -> tuple[bool, float, float]:
        metric, loss = (entry["median"].get(key) for key in ("metric_after", "eval_loss_after"))
        return (metric is None, *_rank(record, metric or 0.0, loss))

    return sorted(record["settings"], key=place)


def _ranked(record: Mapping[str, Any]) -> list[SweptSetting]:
    """A sweep's settings that have a metric, the best first. A lower validation loss decides between equal metrics."""
    groups: dict[str, list[Setting]] = {}
    for entry in record["settings"] if swept(record) else ():
        if entry["status"] == COMPLETE and is_number(entry["median"].get("metric_after")):
            name = ", ".join(f"{flag_of(name)[2:]} {entry['values'].get(name)}" for name in swept(record))
            groups.setdefault(name, []).append(entry)
    settings = [SweptSetting(name, entries) for name, entries in groups.items()]
    return sorted(settings, key=lambda setting: _rank(record, setting.metric, setting.loss))


def _rank(record: Mapping[str, Any], metric: float, loss: float | None) -> tuple[float, float]:
    return (-metric if record.get("higher_is_better", True) else metric, float("inf") if loss is None else loss)


def paired_settings(record: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any] | None]:
    """Map each setting's name to its test against the best setting on the same examples, averaged over seeds
    (`against_best`). The test is None if examples differ or scores are unknown. Empty if this is not a sweep."""
    settings = _ranked(record)
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


def _best_settings(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on which setting is best, which settings may be equally good, and what is unknown."""
    metric, settings = record["main_metric"], _ranked(record)
    if swept(record) and not settings and any(entry["status"] == COMPLETE for entry in record["settings"]):
        yield f"Settings cannot be ranked: no run has {metric} after training; leave out --eval-every off."
    if len(settings) < 2:
        return
    best, others = settings[0], settings[1:]
    tests = {name: test for name, test in record.get("paired", {}).items() if test}
    if alike := [other for other in others if _undecided(best, other, tests.get(other.name))]:
        names = " and ".join(setting.name for setting in (best, *alike))
        gap = max(abs(best.metric - other.metric) for other in alike)
        yield (
            f"It is undecided which setting is best by {metric} after training: {names}. They differ by {shown(gap)} "
            "at most; other seeds or other examples may reverse their order."
        )
    else:
        yield f"{best.name} is the best by {metric} after training."
    words = words_for(record.get("higher_is_better", True))
    verdicts = {name: f", {verdict(test, words)}" for name, test in tests.items()}
    listed = [f"{setting}{verdicts.get(setting.name, '')}" for setting in settings]
    yield f"By {metric}, the best first: {'; '.join(listed[:_LISTED])}."
    if any(setting.spread is None for setting in settings):
        yield "One seed does not show whether such differences repeat; compare several with --seed 1,2,3."


def _undecided(best: SweptSetting, other: SweptSetting, test: Mapping[str, Any] | None) -> bool:
    """Whether other seeds or examples might reverse the order of two settings."""
    spreads = [setting.spread for setting in (best, other) if setting.spread is not None]
    by_seeds = abs(best.metric - other.metric) <= max(spreads, default=0.0)
    return by_seeds or (test is not None and test["p"] >= test["level"])


def _decided(one: Setting, other: Setting) -> bool | None:
    """Whether two settings' speeds differ by more than rounds of one setting do; None if a setting has one round."""
    spreads = [setting["spread"][SPEED] for setting in (one, other)]
    a, b = one["median"][SPEED], other["median"][SPEED]
    return None if None in spreads else abs(a - b) / max(a, b) > max(spreads)


def _speed_and_memory(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield sentences on the fastest setting, and on each other setting's time and memory compared with it."""
    measured = [setting for setting in settings if setting["status"] == COMPLETE and setting["median"][SPEED]]
    if not measured:
        yield "Speed was not measured: no setting completed more steps than --discard-steps leaves out."
        return
    best, *others = sorted(measured, key=lambda setting: -setting["median"][SPEED])
    speed = f"{shown(best['median'][SPEED])} tokens/s, {shown(best['median']['median_step_seconds'])} s a step"
    if any(_decided(best, setting) is None for setting in others):
        yield "The fastest setting is not known: a setting has only one round that counts; --repeat 3 runs three."
    elif close := [setting for setting in others if not _decided(best, setting)]:
        gap = max(1 - setting["median"][SPEED] / best["median"][SPEED] for setting in close)
        spread = max(setting["spread"][SPEED] for setting in (best, *close))
        names = " and ".join(setting["name"] for setting in (best, *close))
        yield (
            f"It is undecided which setting is fastest: {names}. They differ by {percent(gap)} at most, and rounds of "
            f"one setting by {percent(spread)}. {best['name']}: {speed}."
        )
    else:
        yield f"{best['name']} is the fastest: {speed}."
    for setting in others:
        times = f"{best['median'][SPEED] / setting['median'][SPEED]:.2f} times the time of {best['name']}"
        peaks = {key: [one["median"][key] for one in (best, setting)] for key in _MEMORY}
        memory = [f"{b - a:+.2f} GiB {_MEMORY[key]}" for key, (a, b) in peaks.items() if None not in (a, b)]
        yield f"{setting['name']} takes {', '.join([times, *memory])}."


def _disturbed(settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        for number, causes in setting["disturbed"].items():
            disturbed = f"Round {number} of {setting['name']} (*) was disturbed ({'; '.join(causes)})"
            yield f"{disturbed}: its times count only if all rounds of the setting were disturbed."


def _failures(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield which runs did not complete, and why."""
    for setting in settings:
        for run in setting["runs"]:
            if run["status"] != COMPLETE:
                parts = f"{setting['name']}, round {run['round']}", run["status"], run["reason"]
                yield ": ".join(filter(None, parts))


def _learning(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield how far loss curves that should be equal differ, and whether precisions differ."""
    if differing := [setting for setting in settings if setting["loss_difference"]]:
        worst = max(differing, key=lambda setting: setting["loss_difference"]["relative"])
        most = worst["loss_difference"]
        yield (
            f"Loss curves that should be the same differ by {100 * most['relative']:.2g}% at most "
            f"({worst['name']} from {most['to']}, step {most['step']})."
        )
    precisions = sorted({str(setting["launch"]["precision"]) for setting in settings if completed(setting)})
    if len(precisions) > 1:
        yield (
            f"Settings compute in different precisions ({', '.join(precisions)}), which changes time and memory; "
            f"--mixed-precision {precisions[0]} sets one for all."
        )


def _surroundings(settings: Sequence[Setting]) -> Iterator[str]:
    """Yield which conditions differed between runs."""
    around = [run["environment"] for setting in settings for run in setting["runs"]]
    values = {key: {str(facts[key]) for facts in around if facts.get(key) is not None} for key in _FACTS}
    if others := [key for key, different in values.items() if len(different) > 1]:
        yield f"Conditions differ between runs: {', '.join(others)} (see `environment` of each run in comparison.json)."


def percent(share: float | None) -> str:
    """A share as text in percent; "-" for None."""
    return "-" if share is None else f"{100 * share:.0f}%" if share >= 0.095 else f"{100 * share:.1f}%"
