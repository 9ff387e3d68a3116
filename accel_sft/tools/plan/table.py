"""Writes a plan in words or as JSON: the table of launch files, a launch's phases by component, the recommendation."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.api.tool_configs import PlanConfig
from accel_sft.memory.estimate import COMPONENTS, PHASES, Estimate, checkpoint_bytes_each, totals
from accel_sft.memory.flops import peaks
from accel_sft.memory.job import Job
from accel_sft.memory.lengths import Lengths
from accel_sft.memory.shape import ModelShape
from accel_sft.memory.states import FLOAT32, MASTER, MOMENTS
from accel_sft.tools.plan.machine import PlannedMachine
from accel_sft.tools.plan.plans import MARGIN, Plan

GIB = 2**30
_COLUMNS = 80
_HEAD = ("launch file", "GPU", "at", "host", "at", "fits", "forward", "sent", "speed")
_UNITS = ("", "GiB", "", "GiB", "", "", "tokens", "GiB/step", "")


def lines(
    plans: Sequence[Plan],
    shape: ModelShape,
    here: PlannedMachine,
    lengths: Lengths,
    config: PlanConfig,
    asked: Mapping[str, Job],
    best: Plan | None,
    why: str,
    command: str | None,
) -> Iterator[str]:
    """The lines that a terminal shows; the table and the text keep to 80 columns, the command does not.

    Args:
        asked: for each launch file, the job with exactly the settings that the user asked for.
    """
    trained = shape.trained(config.adapter, config.lora_r, config.lora_target_modules)
    if config.train_only is not None:
        how = "counted as if all were trained (--train-only)"
    else:
        how = "all trained" if config.adapter == "none" else f"frozen, {trained:,} trained ({config.adapter})"
    yield _text(f"model    {shape.family}, {shape.parameters:,} parameters, {how}")
    computed = sorted({"float32" if job.precision == "no" else job.precision for job in asked.values()})
    yield _text(f"machine  {here.describe()}" + (f"; computes in {' or '.join(computed)}" if computed else ""))
    yield _text(f"lengths  the longest example has {lengths.longest:,} tokens: {lengths.source}")
    if shape.other and lengths.pixels is None:
        yield _text("images   not counted, as the data has not been tokenized here: start a run once, or --probe")
    elif lengths.pixels and shape.tower and shape.tower.values:
        yield _text(f"images   up to {lengths.pixels // shape.tower.values:,} patches in one example, of this data")
    elif lengths.pixels:
        yield _text("images   not counted beside their pixels: config.json does not name the vision tower's sizes")
    yield ""
    fastest = min((each.speed.seconds for each in plans if each.fits and each.speed), default=0.0)
    rows = [_HEAD, _UNITS, *(_row(each, here, fastest) for each in plans)]
    if not here.gpus:
        rows = [row if _is_problem(row) else (row[0], *row[3:]) for row in rows]
    widths = [max(len(row[at]) for row in rows if not _is_problem(row)) for at in range(len(rows[0]))]
    for row in rows:
        if _is_problem(row):
            yield _text(f"{row[0]:<{widths[0]}}  {row[-1]}", widths[0] + 2)
            continue
        yield "  ".join(
            f"{cell:<{width}}" if at == 0 or _HEAD[at] == "at" else f"{cell:>{width}}"
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
    yield ""
    yield from _notes(plans, here)
    shown = [each for each in plans if each.estimate and (config.details or len(plans) == 1)]
    for each in shown:
        assert each.estimate is not None
        yield from _details(each.name, each.estimate)
    if best is None:
        refused = all(each.problem for each in plans)
        none = "No launch file is recommended: each has a problem, named above."
        also = "" if config.gradient_checkpointing else ", nor does one with --gradient-checkpointing"
        why = f"No launch file fits{also}{why.partition('fits')[2]}. {_fix(plans, config)}"
        yield _text(none if refused else why + _elsewhere(plans, here), 0)
        return
    more = f" with {best.flags} (without, it would {best.without})" if best.more else ""
    yield _text(f"Recommended: {best.name}{more}, {why}.", 0)
    yield _text(f"Disk: {_disk(best, config)}.", 0)
    yield from f"{command}".splitlines()


def as_json(
    plans: Sequence[Plan],
    shape: ModelShape,
    here: PlannedMachine,
    lengths: Lengths,
    best: Plan | None,
    why: str,
    command: str | None,
) -> dict[str, Any]:
    """The content of `lines` as numbers, with memory in bytes."""
    return {
        "model": {"family": shape.family, "parameters": shape.parameters, **shape.by_group},
        "machine": dataclasses.asdict(here),
        "lengths": dataclasses.asdict(lengths),
        "plans": [_plan_json(each) for each in plans],
        "recommended": best.name if best else None,
        "reason": why,
        "command": command,
    }


def side_by_side(name: str, answers: Sequence[Estimate]) -> Iterator[str]:
    """Several estimates of one launch's memory, as columns of a table by phase."""
    for place, attribute in (("one GPU", "device"), ("one rank's host memory", "host")):
        columns = {each.method: totals(getattr(each, attribute)) for each in answers}
        phases = [phase for phase in PHASES if any(phase in column for column in columns.values())]
        if phases:
            yield ""
            yield f"{name}: GiB of {place}, by"
            yield f"{'':<10} " + "  ".join(f"{method:>11}" for method in columns)
        for phase in phases:
            cells = [_gib(column[phase]) if phase in column else "-" for column in columns.values()]
            yield f"{phase:<10} " + "  ".join(f"{cell:>11}" for cell in cells)
    yield ""
    for each in answers:
        if each.failure:
            yield _text(f"{each.method}: failed: {each.failure}", 2)
        for note in each.notes:
            yield _text(f"{each.method}: {note}", 2)


def _plan_json(plan: Plan) -> dict[str, Any]:
    if plan.estimate is None or plan.job is None:
        return {"launch": plan.name, "fits": False, "problem": plan.problem}
    return {
        "launch": plan.name,
        "fits": plan.fits,
        "tight": plan.tight,
        "options": dict(plan.more),
        "over": list(plan.over),
        "ranks": plan.job.ranks,
        "tokens": plan.job.tokens,
        "trained": plan.job.trained,
        "largest_tokens": plan.largest_tokens,
        "device_peak_bytes": plan.estimate.device_peak_bytes,
        "host_peak_bytes": plan.estimate.host_peak_bytes,
        "host_needed_bytes": plan.estimate.host_needed_bytes,
        "tightest": plan.estimate.tightest,
        "speed": dataclasses.asdict(plan.speed) if plan.speed else None,
        "estimate": dataclasses.asdict(plan.estimate),
    }


def _row(plan: Plan, here: PlannedMachine, fastest: float) -> tuple[str, ...]:
    found = plan.estimate
    if found is None:
        return (plan.name, plan.problem)
    fits = "no" if plan.over else "barely" if plan.tight else "yes"
    fits = f"{fits} {''.join(name[0] for name in plan.more)}" if plan.more else fits
    forward = f"{plan.largest_tokens:,}" if plan.largest_tokens else "-"
    speed = f"{fastest / plan.speed.seconds:.2f}" if plan.fits and plan.speed else "-"
    return (
        plan.name,
        _gib(found.device_peak_bytes) + "!" * ("device" in plan.over),
        _largest(totals(found.device)),
        _gib(found.host_needed_bytes) + "!" * ("host" in plan.over),
        _largest(found.host_needed),
        fits,
        forward,
        _gib(plan.speed.sent_bytes) if plan.speed else "",
        speed,
    )


def _is_problem(row: tuple[str, ...]) -> bool:
    return len(row) <= 2


def _largest(phases: Mapping[str, float]) -> str:
    return max(phases, key=phases.__getitem__) if phases else ""


def _notes(plans: Sequence[Plan], here: PlannedMachine) -> Iterator[str]:
    jobs = [each.job for each in plans if each.job]
    if not jobs:
        return
    rows = f"{jobs[0].rows} longest examples" if jobs[0].rows > 1 else "the longest example"
    what = f"a forward of {jobs[0].tokens:,} tokens" + (f" ({rows})" if here.gpus else "")
    where = "one GPU" if here.gpus else "all ranks of this machine"
    yield _text(f"memory   at its peak phase, with {what}; host: of all ranks of a machine; !: too little", 9)
    if spare := max(each.estimate.local_ranks * each.estimate.spare_bytes for each in plans if each.estimate):
        room = f"{_gib(spare)} GiB of host memory more let training go on while checkpoints are written"
        yield _text(f"copies   up to {room}; they are left out where there is no room", 9)
    yield _text("fits     in memory; accel-sft doctor says what else a launch file needs", 9)
    if any("gradient_checkpointing" in each.more for each in plans):
        yield _text("g        with --gradient-checkpointing", 9)
    if counts := sorted({each.more["eval_batch_size"] for each in plans if "eval_batch_size" in each.more}):
        yield _text(f"e        with --eval-batch-size {', '.join(map(str, counts))}", 9)
    yield _text("forward  the largest that fits, up to a rank's part of a step", 9)
    if any(each.tight for each in plans):
        yield _text(f"barely   within {1 - MARGIN:.0%} of {where}'s memory; a prediction may err by as much", 9)
    for each in plans:
        if each.estimate and each.job and each.job.launch.machines > 1:
            yield _text(f"{each.name} on {each.job.launch.machines} such machines: memory of one, speed of all", 9)
    known = f"one {here.gpu}" if peaks(here.gpu) else "a GPU that is not known, on PCIe" if here.gpus else "CPUs"
    yield _text(f"speed    by a simple model of {known}; only ratios between launch files mean anything", 9)
    for note in dict.fromkeys(note for each in plans if each.estimate for note in each.estimate.notes):
        yield _text(f"unknown  {note}", 9)
    yield ""


def _details(name: str, found: Estimate) -> Iterator[str]:
    places = {"one GPU": found.device, "one rank's host memory": found.host}
    for place, memory in places.items():
        if memory:
            yield f"{name}: GiB of {place}"
            short = [each[:11] for each in COMPONENTS]
            yield f"{'':<10} " + " ".join(f"{each:>{max(len(each), 6)}}" for each in [*short, "all"])
            for phase, components in memory.items():
                sizes = [components.get(each, 0.0) for each in COMPONENTS]
                cells = [f"{_gib(size):>{max(len(each), 6)}}" for size, each in zip(sizes, short, strict=True)]
                yield f"{phase:<10} {' '.join(cells)} {_gib(sum(sizes)):>6}"
            yield ""


def _text(text: str, indent: int = 9) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _elsewhere(plans: Sequence[Plan], here: PlannedMachine) -> str:
    """A hint to give --host-memory, if a plan with GPUs fails only for this machine's free host memory; else ""."""
    if not (here.gpus and here.is_free and any(each.over == ("host",) for each in plans)):
        return ""
    free = f"{here.host_bytes / GIB:.0f} GiB of host memory are what is free on this machine now"
    return f" {free}: --host-memory gives that of another."


def _fix(plans: Sequence[Plan], config: PlanConfig) -> str:
    ways = []
    if config.micro_batch_size not in ("auto", "1"):
        ways.append("--micro-batch-size auto")
    ways += ["a lower --max-length", "a smaller model"]
    short = any("device" in each.over for each in plans)
    host = "fewer processes (each needs some), or more host memory, which alone is short"
    ways.append("or more GPUs" if short else host)
    return f"Try {', '.join(ways)}."


def _disk(plan: Plan, config: PlanConfig) -> str:
    """What a run under this plan writes, and moves in a step."""
    assert plan.job is not None
    assert plan.speed is not None
    job, kept = plan.job, str(config.keep_checkpoints)
    parts = [f"best/ and final/ {_gib(job.stored_bytes * (job.trained if job.is_frozen else job.parameters))} GiB each"]
    if job.saves:
        size = checkpoint_bytes_each(job.ema_decay is not None) * job.trained
        at_once = f", {int(kept) + 1} at once" if kept.isdecimal() else ""
        parts.append(f"a checkpoint {_gib(size)} GiB{at_once} (--keep-checkpoints {kept})")
    swapped: float = (MASTER + MOMENTS + FLOAT32) * job.trained * (job.launch.offload("optimizer") == "nvme")
    swapped += job.computes_bytes * job.parameters * (job.launch.offload("param") == "nvme")
    if swapped := swapped * job.local_ranks / job.ranks:
        moved = _gib(plan.speed.host_bytes * job.local_ranks)
        parts.append(f"{_gib(swapped)} GiB on the NVMe drive, to and from which a step moves {moved} GiB")
    return "; ".join(parts)


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:,.0f}" if gib >= 999.5 else f"{gib:.1f}" if gib >= 9.95 else f"{gib:.2f}"
