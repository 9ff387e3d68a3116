"""States a comparison's findings in sentences: the fastest setting, the leanest, what offload costs, what disturbs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.io.files import is_number
from accel_sft.io.text import shown
from accel_sft.launch.child import COMPLETE
from accel_sft.tools.compare import learning_curve
from accel_sft.tools.compare.measured import EXECUTION, completed
from accel_sft.tools.compare.settings import flag_of, same_but
from accel_sft.tools.compare.sweep import best_settings, costs_alike
from accel_sft.tools.compare.tables import percent

Setting = Mapping[str, Any]
"""An entry of the record's `settings`."""
SPEED = "tokens_per_second"
_PEAKS = ("predicted", "measured")
_SAME_MEMORY = 0.01
"""Relative difference up to which peaks of memory count as equal, since memory varies from run to run."""


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return one or two sentences for each finding; speed is compared in tokens/s, as batch sizes may differ.

    A sweep's findings begin with the settings that learn best, and mention speed only if a varied option affects it;
    those of a comparison of numbers of rows are its learning curve.
    """
    settings = record["settings"]
    if learnt := [*learning_curve.in_sentences(record)]:
        return [*learnt, *_failures(settings)]
    lines = [*best_settings(record), *([] if costs_alike(record) else _time_and_memory(record))]
    lines += [*_disturbed(settings), *_predictions(settings), *_batches(settings), *_failures(settings)]
    return [*lines, *_learning(settings), *_surroundings(record)]


def decided(one: Setting, other: Setting, key: str = SPEED) -> bool | None:
    """Whether two medians differ by more than the rounds of either setting; None if one of them has a single round."""
    spreads = [setting["spread"][key] for setting in (one, other)]
    a, b = one["median"][key], other["median"][key]
    return None if None in spreads else abs(a - b) / max(a, b) > max(spreads)


# --- time and memory ---


def _time_and_memory(record: Mapping[str, Any]) -> list[str]:
    settings = record["settings"]
    measured = [setting for setting in settings if setting["status"] == COMPLETE and setting["median"][SPEED]]
    if not measured:
        return ["No setting was measured: none came to its end with a step behind the discarded ones."]
    best = max(measured, key=lambda setting: setting["median"][SPEED])
    lines = [*_fastest(best, measured), *_leanest(best, measured), *_offload(measured), *_stages(measured)]
    return [*lines, *_options(measured, record["varied"])]


def _fastest(best: Setting, measured: Sequence[Setting]) -> Iterator[str]:
    step, others = best["median"]["median_step_seconds"], [setting for setting in measured if setting is not best]
    speed = f"{shown(best['median'][SPEED])} tokens/s, {shown(step)} s a step"
    if not others:
        yield f"{best['name']} is the only setting that was measured: {speed}."
    elif any(decided(best, setting) is None for setting in others):
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
        yield f"{best['name']} is the fastest: {speed}."


def _leanest(best: Setting, measured: Sequence[Setting]) -> Iterator[str]:
    key, what = _memory_key(measured)
    with_peak = [setting for setting in measured if setting["median"][key]]
    if best not in with_peak or len(with_peak) < 2:
        return
    lean, needed = min(with_peak, key=lambda setting: setting["median"][key]), best["median"][key]
    least = lean["median"][key]
    tolerance = max(_SAME_MEMORY, *(setting["spread"][key] or 0 for setting in (lean, best)))
    if needed <= least * (1 + tolerance):
        yield f"No setting needs noticeably less {what} than {best['name']}: {shown(needed)} GiB at its peak."
    else:
        yield (
            f"{lean['name']} needs the least {what}: {shown(least)} GiB at its peak, against {shown(needed)} GiB of "
            f"{best['name']}, at {lean['median'][SPEED] / best['median'][SPEED]:.2f} of its speed."
        )


def _memory_key(settings: Sequence[Setting]) -> tuple[str, str]:
    """Return key and name of the memory to compare: a GPU's if any setting used a GPU, else the host's."""
    if any(setting["median"]["peak_device_memory_gib"] for setting in settings):
        return "peak_device_memory_gib", "memory of a GPU"
    return "peak_host_memory_gib", "host memory of a rank"


def _other_launches(setting: Setting, measured: Sequence[Setting]) -> list[Setting]:
    """The settings that differ from this one in their launch file alone, with as many processes."""
    count, launch_options = setting["launch"]["processes"], ("launch", "num_processes")  # `single` has no number
    alike = [other for other in measured if other is not setting and same_but(setting, other, launch_options)]
    return [other for other in alike if other["launch"]["processes"] == count]


def _offloads(setting: Setting) -> bool:
    return any(place != "none" for place in setting["launch"]["offload"].values())


def _offload(measured: Sequence[Setting]) -> Iterator[str]:
    alike = ("zero_stage", "backend", "precision")
    for setting in filter(_offloads, measured):
        for plain in _other_launches(setting, measured):
            if _offloads(plain) or any(plain["launch"][key] != setting["launch"][key] for key in alike):
                continue
            times = f"{plain['median'][SPEED] / setting['median'][SPEED]:.2f} times the time of {plain['name']}"
            as_long = f"as long as {plain['name']}, within the spread of their rounds"
            time = {True: times, None: f"{times} in one round", False: as_long}[decided(setting, plain)]
            saved = _difference(plain, setting, "peak_device_memory_gib")
            on_gpu = "there is no GPU whose memory it could save"
            device = on_gpu if saved is None else f"it saves {saved:.2f} GiB on a GPU"
            host = _difference(setting, plain, "host_memory_all_ranks_gib")
            moved = "" if host is None else f", and changes host memory by {host:+.2f} GiB over all ranks"
            yield f"What offload costs here: {setting['name']} takes {time}; {device}{moved}."


def _difference(one: Setting, other: Setting, key: str) -> float | None:
    a, b = (setting["median"][key] for setting in (one, other))
    return None if a is None or b is None else a - b


def _stages(measured: Sequence[Setting]) -> Iterator[str]:
    key, what = _memory_key(measured)
    without_gain = []
    for setting in measured:
        needed = setting["median"][key]
        lower = [other for other in _other_launches(setting, measured) if _is_stage_below(other, setting)]
        below = max((other for other in lower if other["median"][key]), key=_stage, default=None)
        if below and needed and needed >= (lower_need := below["median"][key]) * (1 - _SAME_MEMORY):
            without_gain.append(f"{setting['name']} needs {shown(needed)} GiB, {below['name']} {shown(lower_need)}")
    if without_gain:
        yield f"A higher ZeRO stage did not save {what} here: {'; '.join(without_gain)}."


def _is_stage_below(other: Setting, setting: Setting) -> bool:
    """Whether `other` has a lower ZeRO stage or none, and no offload."""
    sharded_alike = setting["launch"]["backend"] == "deepspeed" and other["launch"]["backend"] != "fsdp"
    return sharded_alike and not _offloads(other) and _stage(other) < _stage(setting)


def _stage(setting: Setting) -> int:
    """The ZeRO stage; 0 without ZeRO."""
    return setting["launch"]["zero_stage"] or 0


def _options(measured: Sequence[Setting], varied: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the fastest value of each varied option, all else being equal, if several options vary."""
    for name in (name for name in varied if name != "launch" and len(varied) > 1):
        groups: list[list[Setting]] = []
        for setting in sorted(measured, key=lambda setting: setting["median"][SPEED]):
            group = next((group for group in groups if same_but(group[0], setting, {name})), None)
            groups.append([setting]) if group is None else group.append(setting)
        decisions = [(decided(group[0], group[-1]), group) for group in groups if len(group) > 1]
        clear = [group for decision, group in decisions if decision]
        flag = flag_of(name)
        if not decisions or any(decision is None for decision, _ in decisions):
            continue
        if not clear:
            yield f"{flag} makes no difference larger than the spread between rounds."
            continue
        ratios = sorted(group[-1]["median"][SPEED] / group[0]["median"][SPEED] for group in clear)
        times = f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(ratios) > 1 else "")
        winners = {str(group[-1]["values"].get(name)) for group in clear}
        if len(winners) == 1:
            yield f"{flag} {winners.pop()} is the fastest: {times} times the tokens/s of the slowest, all else equal."
        else:
            which = "; ".join(group[-1]["name"] for group in clear)
            yield f"Which {flag} is the fastest depends on the rest: {which}."


# --- what a reader of the numbers must know ---


def _disturbed(settings: Sequence[Setting]) -> Iterator[str]:
    """Say which rounds were disturbed, and whether their times count."""
    for setting in settings:
        count = len(setting["disturbed"]) == len(completed(setting))
        times = "its times count, as no round was undisturbed" if count else "its times do not count"
        for number, what in setting["disturbed"].items():
            yield f"{setting['name']}, round {number} (*): disturbed, {times} ({'; '.join(what)})."


def _predictions(settings: Sequence[Setting]) -> Iterator[str]:
    """Say by how much the predicted peaks of memory were wrong, in the first completed run of each setting."""
    errors: dict[str, float] = {}
    for setting in settings:
        for place, phases in ((completed(setting)[:1] or [{}])[0].get("memory") or {}).items():
            predicted, measured = (max(phase[f"{key}_gib"] for phase in phases.values()) for key in _PEAKS)
            errors[f"{setting['name']}, {place}"] = predicted / measured - 1
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        mean = sum(map(abs, errors.values())) / len(errors)
        yield (
            f"Peaks of memory were predicted with a mean error of {percent(mean)}; the largest is "
            f"{100 * errors[worst]:+.0f}% ({worst})."
        )


def _batches(settings: Sequence[Setting]) -> Iterator[str]:
    """Say which share of a step reading rows and making batches takes at most."""
    runs = [(run["batch_share"], setting["name"]) for setting in settings for run in completed(setting)]
    if shares := [(share, name) for share, name in runs if share is not None]:
        share, name = max(shares)
        yield (
            f"Reading rows and making batches takes {percent(share)} of a step at most ({name}): more than that no "
            "faster disk or processor can save."
        )


def _failures(settings: Sequence[Setting]) -> Iterator[str]:
    """Say which settings or runs did not complete, and why."""
    for setting in settings:
        failed = [run for run in setting["runs"] if run["status"] != COMPLETE]
        if setting["status"] != COMPLETE:
            yield ": ".join(filter(None, (setting["name"], setting["status"], setting["reason"])))
        elif failed:
            count = f"{len(failed)} of {len(setting['runs'])} runs"
            yield f"{setting['name']}: {count} ended otherwise: {failed[-1]['status']}: {failed[-1]['reason']}"


def _learning(settings: Sequence[Setting]) -> Iterator[str]:
    """Say by how much loss curves differ that should be the same, and why others may."""
    if differing := [setting for setting in settings if setting["loss_difference"]]:
        worst = max(differing, key=lambda setting: setting["loss_difference"]["relative"])
        most = worst["loss_difference"]
        yield (
            f"Loss curves that should be the same differ by {100 * most['relative']:.2g}% at most "
            f"({worst['name']} from {most['to']}, step {most['step']})."
        )
    done = [setting for setting in settings if completed(setting)]
    if len(precisions := sorted({str(setting["launch"]["precision"]) for setting in done})) > 1:
        yield (
            f"Not all settings compute in the same precision ({', '.join(precisions)}), on which time and memory "
            f"depend: --mixed-precision {precisions[0]} sets it for all."
        )
    if any(not same_but(done[0], setting, EXECUTION) for setting in done):
        yield "Not all settings learn the same: they differ in more than how a step is executed."
    if len(sizes := sorted({setting["global_batch_size"] for setting in settings})) > 1:
        examples = ", ".join(map(str, sizes))
        yield f"Steps do not learn from as many examples in every setting ({examples}): go by tokens/s, not by s/step."


def _surroundings(record: Mapping[str, Any]) -> Iterator[str]:
    differing, cores = record["differences"]["environment"], record["environment"]["cores"]
    loads = [load for load in differing.get("load_before", {}).values() if is_number(load)]
    if busy := [load for load in loads if load > cores]:
        yield (
            f"The machine was busy: before {len(busy)} of {len(loads)} launches its load was above its {cores} cores "
            f"(up to {max(busy):.1f}), so times are longer, and differ more, than on a quiet one."
        )
    if others := [key for key in differing if not key.endswith(("before", "before_gib"))]:
        yield f"Not the same around all runs: {', '.join(others)} (`differences` of comparison.json has them by run)."
