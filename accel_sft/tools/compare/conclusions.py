"""States a comparison's findings in sentences: which cell is fastest, which needs least memory, what offload costs."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.io.text import shown
from accel_sft.tools.compare import learning_curve
from accel_sft.tools.compare.cells import flag_of
from accel_sft.tools.compare.outcome import COMPLETE
from accel_sft.tools.compare.remarks import failures, remarks
from accel_sft.tools.compare.sweep import best_settings, costs_alike
from accel_sft.tools.compare.tables import percent

Cell = Mapping[str, Any]
SPEED = "tokens_per_second"
_SAME_MEMORY = 0.01
"""Relative difference up to which peaks of memory count as equal, since memory varies from run to run."""


def findings(record: Mapping[str, Any]) -> list[str]:
    """Return one or two sentences for each finding; speed is compared in tokens/s, as batch sizes may differ.

    A sweep's findings begin with the settings that learn best, and mention speed only if a varied option affects it;
    those of a comparison of numbers of rows are its learning curve.
    """
    cells = record["cells"]
    if learnt := [*learning_curve.in_sentences(record)]:
        return [*learnt, *failures(cells)]
    measured = [cell for cell in cells if cell["status"] == COMPLETE and cell["median"][SPEED]]
    if costs_alike(record):
        lines = []
    elif measured:
        best = max(measured, key=lambda cell: cell["median"][SPEED])
        lines = [*_fastest(best, measured), *_leanest(best, measured), *_offload(measured), *_stages(measured)]
        lines += _options(measured, record["varied"])
    else:
        lines = ["No cell was measured: none came to its end with a step behind the discarded ones."]
    return [*best_settings(record), *lines, *remarks(record)]


def decided(one: Cell, other: Cell, key: str = SPEED) -> bool | None:
    """Whether two cells' medians differ by more than the rounds of either cell; None if a cell has only one round."""
    spreads, (a, b) = [cell["spread"][key] for cell in (one, other)], (one["median"][key], other["median"][key])
    return None if None in spreads else abs(a - b) / max(a, b) > max(spreads)


def memory_key(cells: Sequence[Cell]) -> tuple[str, str]:
    """Return key and name of the memory to compare: a GPU's if any cell used a GPU, else the host's."""
    if any(cell["median"]["peak_device_memory_gib"] for cell in cells):
        return "peak_device_memory_gib", "memory of a GPU"
    return "peak_host_memory_gib", "host memory of a rank"


def _fastest(best: Cell, measured: Sequence[Cell]) -> Iterator[str]:
    step, others = best["median"]["median_step_seconds"], [cell for cell in measured if cell is not best]
    speed = f"{shown(best['median'][SPEED])} tokens/s, {shown(step)} s a step"
    if not others:
        yield f"{best['name']} is the only cell that was measured: {speed}."
        return
    if any(decided(best, cell) is None for cell in others):
        others_too = any(cell["spread"][SPEED] is None and len(cell["runs"]) > 1 for cell in measured)
        once = "has only one round that counts" if others_too else "ran only once"
        yield f"Which cell is the fastest is not known, as a cell {once}: --repeat 3 shows which differences repeat."
    elif close := [cell for cell in others if not decided(best, cell)]:
        behind = max(1 - cell["median"][SPEED] / best["median"][SPEED] for cell in close)
        spread = max(cell["spread"][SPEED] for cell in (best, *close))
        which = " and ".join(cell["name"] for cell in (best, *close))
        yield (
            f"Undecided which is the fastest: {which}. They differ by {percent(behind)} at most, and rounds of one and "
            f"the same cell by up to {percent(spread)}; {best['name']} has {speed}."
        )
    else:
        yield f"{best['name']} is the fastest: {speed}."


def _leanest(best: Cell, measured: Sequence[Cell]) -> Iterator[str]:
    key, what = memory_key(measured)
    known = [cell for cell in measured if cell["median"][key]]
    if best not in known or len(known) < 2:
        return
    lean, needed = min(known, key=lambda cell: cell["median"][key]), best["median"][key]
    least = lean["median"][key]
    tolerance = max(_SAME_MEMORY, *(cell["spread"][key] or 0 for cell in (lean, best)))
    if needed <= least * (1 + tolerance):
        yield f"No cell needs noticeably less {what} than {best['name']}: {shown(needed)} GiB at its peak."
    else:
        yield (
            f"{lean['name']} needs the least {what}: {shown(least)} GiB at its peak, against {shown(needed)} GiB of "
            f"{best['name']}, at {lean['median'][SPEED] / best['median'][SPEED]:.2f} of its speed."
        )


def _offload(measured: Sequence[Cell]) -> Iterator[str]:
    for cell in measured:
        plain = next((other for other in measured if _offloads_what_stays(cell, other)), None)
        if plain is None:
            continue
        ratio = plain["median"][SPEED] / cell["median"][SPEED]
        in_one = " in one round" if decided(cell, plain) is None else ""
        time = f"{cell['name']} takes {ratio:.2f} times the time of {plain['name']}{in_one}"
        if decided(cell, plain) is False:
            time = f"between {cell['name']} and {plain['name']} the difference in time is within the spread"
        yield f"What offload costs here: {time}; {_moved(cell, plain)}."


def _offloads_what_stays(cell: Cell, other: Cell) -> bool:
    """Whether `cell` offloads and `other` does not, all else being equal."""
    places = [{*each["launch"]["offload"].values()} == {"none"} for each in (cell, other)]
    same = all(
        cell["launch"][key] == other["launch"][key] for key in ("zero_stage", "backend", "processes", "precision")
    )
    return places == [False, True] and same and _alike(cell, other, "launch")


def _moved(cell: Cell, plain: Cell) -> str:
    device = _difference(plain, cell, "peak_device_memory_gib")
    host = _difference(cell, plain, "host_memory_all_ranks_gib")
    host_too = "" if host is None else f", and changes host memory by {host:+.2f} GiB over all ranks"
    if device is None:
        return f"there is no GPU whose memory it could save{host_too}"
    return f"it saves {device:.2f} GiB on a GPU{host_too}"


def _stages(measured: Sequence[Cell]) -> Iterator[str]:
    key, what = memory_key(measured)
    vain = []
    for cell in measured:
        lower = [other for other in measured if _is_stage_below(other, cell) and other["median"][key]]
        below = max(lower, key=_stage, default=None)
        needed = cell["median"][key]
        if below and needed and needed >= below["median"][key] * (1 - _SAME_MEMORY):
            vain.append(
                f"{cell['name']} needs {shown(needed)} GiB, {below['name']} {shown(below['median'][key])}"
                f"{_why_in_vain(cell, below, key)}"
            )
    if vain:
        yield f"A higher ZeRO stage did not save {what} here: {'; '.join(vain)}."


def _why_in_vain(cell: Cell, below: Cell, key: str) -> str:
    """Say what a stage saves before the first step and takes in steps, from the phases of first completed runs."""
    held = "device_allocated_gib" if key == "peak_device_memory_gib" else "process_memory_gib"
    found = []
    for each in (cell, below):
        run = next((run for run in each["runs"] if run["status"] == COMPLETE), None)
        ready = next((p.get(held) for p in reversed(run["phases"]) if p["phase"] == "ready"), None) if run else None
        if run is None or ready is None or not run.get(key):
            return ""
        found.append((ready, run[key] - ready))
    (ready, steps), (ready_below, steps_below) = found
    held_more, taken_more = ready - ready_below, steps - steps_below
    before = f"{abs(held_more):.2g} GiB {'more' if held_more > 0 else 'less'}"
    then = f"{abs(taken_more):.2g} GiB {'more' if taken_more > 0 else 'less'}"
    in_steps = taken_more > held_more
    why = "weights that are gathered, and buffers to exchange them" if in_steps else "its engine has copies of its own"
    return f" (before the first step it holds {before}, and from then on it takes {then}: {why})"


def _is_stage_below(other: Cell, cell: Cell) -> bool:
    """Whether two cells differ in their launch alone: `other` has a lower ZeRO stage or none, and no offload."""
    launches = cell["launch"], other["launch"]
    sharded_alike = launches[0]["backend"] == "deepspeed" and launches[1]["backend"] != "fsdp"
    plain = {*launches[1]["offload"].values()} <= {"none"} and launches[0]["processes"] == launches[1]["processes"]
    # `single` is told no number of processes
    one, two = ({"settings": {**each["settings"], "num_processes": None}} for each in (cell, other))
    return sharded_alike and plain and _stage(other) < _stage(cell) and _alike(one, two, "launch")


def _stage(cell: Cell) -> int:
    """The cell's ZeRO stage; 0 without ZeRO."""
    return cell["launch"]["zero_stage"] or 0


def _options(measured: Sequence[Cell], varied: Sequence[str]) -> Iterator[str]:
    """Yield a sentence on the fastest value of each varied option, all else being equal, if several options vary."""
    for name in (name for name in varied if name != "launch" and len(varied) > 1):
        groups: list[list[Cell]] = []
        for cell in measured:
            group = next((group for group in groups if _alike(group[0], cell, name)), None)
            groups.append([cell]) if group is None else group.append(cell)
        ranked = [sorted(group, key=lambda cell: cell["median"][SPEED]) for group in groups if len(group) > 1]
        clear = [group for group in ranked if decided(group[0], group[-1])]
        flag = flag_of(name)
        if not ranked or any(decided(group[0], group[-1]) is None for group in ranked):
            continue
        if not clear:
            yield f"{flag} makes no difference larger than the spread between rounds."
            continue
        ratios = sorted(group[-1]["median"][SPEED] / group[0]["median"][SPEED] for group in clear)
        times = f"{ratios[0]:.2f}" + (f" to {ratios[-1]:.2f}" if len(ratios) > 1 else "")
        winners = {str(group[-1]["settings"].get(name)) for group in clear}
        if len(winners) == 1:
            yield f"{flag} {winners.pop()} is the fastest: {times} times the tokens/s of the slowest, all else equal."
        else:
            which = "; ".join(group[-1]["name"] for group in clear)
            yield f"Which {flag} is the fastest depends on the rest: {which}."


def _alike(cell: Cell, other: Cell, but: str) -> bool:
    """Whether two cells differ in the setting `but` and in no other."""
    one, two = cell["settings"], other["settings"]
    return one.get(but) != two.get(but) and all(one.get(k) == two.get(k) for k in {*one, *two} - {but})


def _difference(one: Cell, other: Cell, key: str) -> float | None:
    a, b = (cell["median"][key] for cell in (one, other))
    return None if a is None or b is None else a - b
