"""States a comparison's findings in sentences: the fastest setting, the costs of the others, and disturbances."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.tools.compare import learning_curve
from accel_sft.tools.compare.measured import EXECUTION, completed
from accel_sft.tools.compare.sweep import best_settings, swept
from accel_sft.tools.compare.tables import percent

Setting = Mapping[str, Any]
"""An entry of the record's `settings`."""
SPEED = "tokens_per_second"
_MEMORY = {"peak_device_memory_gib": "on a GPU", "host_memory_all_ranks_gib": "of host memory"}
_FACTS = ("device", "cores", "platform", "versions", "data")
"""Conditions that should be the same for all runs, by their keys in a run's `environment`."""


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return a sentence or two for each finding; speed is compared in tokens/s, as batch sizes may differ.

    A sweep's findings begin with the best settings, and mention speed only if launches or layouts vary; those of a
    comparison of numbers of rows are its learning curve.
    """
    settings = record["settings"]
    if learnt := [*learning_curve.in_sentences(record)]:
        return [*learnt, *_failures(settings)]
    lines = [*best_settings(record)]
    if not swept(record) or EXECUTION & {*record["varied"]}:
        lines += _speed_and_memory(settings)
    return [*lines, *_disturbed(settings), *_failures(settings), *_learning(settings), *_surroundings(record)]


def decided(one: Setting, other: Setting) -> bool | None:
    """Whether two speeds differ by more than the rounds of either setting; None if one of them has a single round."""
    spreads = [setting["spread"][SPEED] for setting in (one, other)]
    a, b = one["median"][SPEED], other["median"][SPEED]
    return None if None in spreads else abs(a - b) / max(a, b) > max(spreads)


def _speed_and_memory(settings: Sequence[Setting]) -> Iterator[str]:
    """Name the fastest setting, and the extra time and saved memory of each other setting."""
    measured = [setting for setting in settings if setting["status"] == COMPLETE and setting["median"][SPEED]]
    if not measured:
        yield "Nothing was measured: no setting finished with more steps than the number discarded at the start."
        return
    best, *others = sorted(measured, key=lambda setting: -setting["median"][SPEED])
    speed = f"{shown(best['median'][SPEED])} tokens/s, {shown(best['median']['median_step_seconds'])} s a step"
    if any(decided(best, setting) is None for setting in others):
        yield "Which setting is the fastest is not known: one has a single round that counts; --repeat 3 runs more."
    elif close := [setting for setting in others if not decided(best, setting)]:
        behind = max(1 - setting["median"][SPEED] / best["median"][SPEED] for setting in close)
        spread = max(setting["spread"][SPEED] for setting in (best, *close))
        which = " and ".join(setting["name"] for setting in (best, *close))
        yield (
            f"Undecided which is the fastest: {which}. They differ by {percent(behind)} at most, rounds of one "
            f"setting by {percent(spread)}; {best['name']}: {speed}."
        )
    else:
        yield f"{best['name']} is the fastest{'' if others else ', as no other was measured'}: {speed}."
    for setting in others:
        times = f"{best['median'][SPEED] / setting['median'][SPEED]:.2f} times the time of {best['name']}"
        peaks = {key: [one["median"][key] for one in (best, setting)] for key in _MEMORY}
        memory = [f"{b - a:+.2f} GiB {_MEMORY[key]}" for key, (a, b) in peaks.items() if None not in (a, b)]
        yield f"{setting['name']} takes {', '.join([times, *memory])}."


def _disturbed(settings: Sequence[Setting]) -> Iterator[str]:
    for setting in settings:
        for number, what in setting["disturbed"].items():
            counts = "its times count only if the setting has no other round"
            yield f"{setting['name']}, round {number} (*): disturbed, {counts} ({'; '.join(what)})."


def _failures(settings: Sequence[Setting]) -> Iterator[str]:
    """Say which runs did not complete, and why."""
    for setting in settings:
        for run in setting["runs"]:
            if run["status"] != COMPLETE:
                yield ": ".join(
                    filter(None, (f"{setting['name']}, round {run['round']}", run["status"], run["reason"]))
                )


def _learning(settings: Sequence[Setting]) -> Iterator[str]:
    """Say how much loss curves that should be equal differ, and whether precisions differ."""
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
            f"Not all settings compute in the same precision ({', '.join(precisions)}), on which time and memory "
            f"depend: --mixed-precision {precisions[0]} sets it for all."
        )


def _surroundings(record: Mapping[str, Any]) -> Iterator[str]:
    """Say whether the machine was busy, and which conditions differed between runs."""
    around = [run["environment"] for setting in record["settings"] for run in setting["runs"]]
    cores = record["environment"]["cores"]
    loads = [load for facts in around if is_number(load := facts.get("load_before"))]
    if busy := [load for load in loads if load > cores]:
        yield (
            f"The machine was busy: before {len(busy)} of {len(loads)} launches its load was above its {cores} cores "
            f"(up to {max(busy):.1f}), so times are longer, and differ more, than on a quiet one."
        )
    values = {key: {str(facts[key]) for facts in around if facts.get(key) is not None} for key in _FACTS}
    if others := [key for key, different in values.items() if len(different) > 1]:
        yield f"Not the same around all runs: {', '.join(others)} (`environment` of each run in comparison.json)."
