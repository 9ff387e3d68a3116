"""Ranks the settings of a sweep, which is a comparison that varies what a step computes, by the task's metric."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.io.files import is_number, read_object
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.results.resampled import read_measured
from accel_sft.results.significance import Measured, against_best, average, span, verdict, words_for
from accel_sft.tools.compare.learning_curve import of_rows
from accel_sft.tools.compare.measured import EXECUTION, completed
from accel_sft.tools.compare.settings import flag_of

SEED = "seed"
_COST_NOTHING = frozenset(
    {"learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay", "max_grad_norm", "adam_beta1", "adam_beta2", SEED}
    | {"warmup_steps", "decay_ratio", "min_lr_ratio", "lora_r", "lora_alpha", "lora_dropout"}
)
"""Options that change the time and memory of a step hardly or not at all."""
_TRAINERS = {"launch", "num_processes", "mixed_precision", *(field.name for field in dataclasses.fields(TrainConfig))}
"""Options of the launcher and the trainer; any other option is the task's own."""
_LISTED = 8
"""Maximum number of settings that the ranking's sentence lists."""


@dataclasses.dataclass(frozen=True)
class SweptSetting:
    """One combination of the swept values, with all seeds, and all launches, which learn the same.

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
    def seeds(self) -> int:
        return len({str(entry["values"].get(SEED)) for entry in self.entries})

    @property
    def loss(self) -> float | None:
        """Median of the entries' validation losses after training; None if no entry has one."""
        losses = [loss for entry in self.entries if is_number(loss := entry["median"].get("eval_loss_after"))]
        return statistics.median(losses) if losses else None

    @property
    def spread(self) -> float | None:
        """The range of the metric; None with a single seed, since runs with the same seed learn the same."""
        return max(self.metrics) - min(self.metrics) if self.seeds > 1 else None


def swept(record: Mapping[str, Any]) -> list[str]:
    """Return the varied options that change what is learnt, except the seed; if there are none, this is no sweep."""
    return [name for name in record["varied"] if name not in EXECUTION and name != SEED]


def costs_alike(record: Mapping[str, Any]) -> bool:
    """Whether this is a sweep whose varied options hardly change the time and memory of a step."""
    return bool(swept(record)) and {*record["varied"]} <= _COST_NOTHING


def in_order(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the record's settings; those of a sweep are sorted, the best first and those without a metric last, but
    not those of numbers of rows."""
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


def paired_settings(record: Mapping[str, Any], folder: Path) -> dict[str, dict[str, Any] | None]:
    """Each setting but the best, by name, tested against the best on the same examples, its runs with several seeds
    together (`against_best`); None if there is no such test, as the examples differ or their scores are not known.
    Empty if this is no sweep."""
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
    """Yield sentences on which setting learns best, which settings tie with it, and what is not known.

    With fewer than two ranked settings there is at most the sentence that they cannot be ranked.
    """
    metric, settings = record["main_metric"], ranked(record) if swept(record) else []
    if swept(record) and not settings and any(entry["status"] == COMPLETE for entry in record["settings"]):
        yield f"Settings cannot be ranked: no run has {metric} after training; leave out --eval-every off."
    if len(settings) < 2:
        return
    best, others = settings[0], settings[1:]
    tests = {name: test for name, test in record.get("paired", {}).items() if test}
    tied = [other for other in others if other.metric == best.metric]
    close = [other for other in others if other not in tied and _undecided(best, other, tests.get(other.name))]
    spreads = [setting.spread for setting in settings if setting.spread is not None]
    if close:
        which = " and ".join(setting.name for setting in (best, *tied, *close))
        behind = max(abs(best.metric - other.metric) for other in close)
        noise = "no test on the same examples distinguishes them"
        if spreads and behind <= max(spreads):
            noise = f"seeds of one setting by up to {shown(max(spreads))}"
        yield (
            f"Undecided which is the best by {metric} after training: {which}. They differ by {shown(behind)} at most, "
            f"and {noise}."
        )
    elif tied:
        which = "all settings" if len(tied) == len(others) else "; ".join(setting.name for setting in (best, *tied))
        yield f"A tie: {which} have the same {metric} after training, {_metric(best)}.{_by_loss(best, tied)}"
    else:
        yield f"{best.name} is the best by {metric} after training: {_metric(best)}{_and_loss(best)}."
    words = words_for(record.get("higher_is_better", True))
    against = {name: f", {verdict(test, words)}" for name, test in tests.items()}
    listed = [f"{one.name}: {_metric(one)}{_and_loss(one)}{against.get(one.name, '')}" for one in settings[:_LISTED]]
    rest = f"; and {len(settings) - _LISTED} more" if len(settings) > _LISTED else ""
    yield f"By {metric}, the best first: {'; '.join(listed)}{rest}."
    if tests:
        yield f"Each is tested against the best on the same examples, corrected for {len(settings)} settings (Holm)."
    if tests and len(tests) < len(others):
        yield "Some settings are not tested against the best: their examples differ, or their answers are not there."
    if len(spreads) < len(settings):
        yield (
            "A setting was trained with one seed only, so it is not known whether such differences repeat; "
            "--seed 1,2,3 tells, another round of that seed does not."
        )
    for name in swept(record):
        yield from _end(name, best, settings, [*tied, *close])
    if own := [flag_of(name) for name in swept(record) if name not in _TRAINERS]:
        yield (
            f"Options of the task itself: {', '.join(own)}. If they change the validation examples, metrics cannot be "
            "compared."
        )


def _rank(record: Mapping[str, Any], metric: float, loss: float | None) -> tuple[float, float]:
    return (-metric if record.get("higher_is_better", True) else metric, float("inf") if loss is None else loss)


def _metric(setting: SweptSetting) -> str:
    if len(setting.metrics) == 1:
        low, high = (setting.entries[0]["median"].get(key) for key in ("metric_low", "metric_high"))
        return shown(setting.metric) + (f" (95%: {span(low, high)})" if is_number(low) and is_number(high) else "")
    what = f"{setting.seeds} seeds" if setting.seeds > 1 else f"{len(setting.metrics)} runs"
    if min(setting.metrics) == max(setting.metrics):
        return f"{shown(setting.metric)} (in all {what})"
    return f"{shown(setting.metric)} (median of {what}, {shown(min(setting.metrics))} to {shown(max(setting.metrics))})"


def _and_loss(setting: SweptSetting) -> str:
    return "" if setting.loss is None else f", validation loss {shown(setting.loss)}"


def _by_loss(best: SweptSetting, tied: Sequence[SweptSetting]) -> str:
    losses = [other.loss for other in tied if other.loss is not None]
    if best.loss is None or not losses or min(losses) == best.loss:
        return ""
    return f" {best.name} has the lowest validation loss, {shown(best.loss)} against {shown(min(losses))}."


def _undecided(best: SweptSetting, other: SweptSetting, test: Mapping[str, Any] | None) -> bool:
    """Whether other seeds or other examples may turn the order of two settings round."""
    spreads = [setting.spread for setting in (best, other) if setting.spread is not None]
    by_seeds = bool(spreads) and abs(best.metric - other.metric) <= max(spreads)
    return by_seeds or (test is not None and test["p"] >= test["level"])


def _end(
    name: str, best: SweptSetting, settings: Sequence[SweptSetting], as_good: Sequence[SweptSetting]
) -> Iterator[str]:
    """Yield a sentence if the option's best value is the largest or smallest that was tried."""
    value, *good = (setting.entries[0]["values"].get(name) for setting in (best, *as_good))
    values = {number for setting in settings if is_number(number := setting.entries[0]["values"].get(name))}
    if len(values) > 1 and value in values and {*good} <= {value}:
        for end, most, more in ((max(values), "largest", "larger"), (min(values), "smallest", "smaller")):
            if value == end:
                yield f"{flag_of(name)} {value} is the {most} that was tried: a {more} one may be better still."
