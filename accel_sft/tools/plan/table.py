"""Writes a plan in words or as JSON: the table of launch files, a launch's phases by component, the recommendation."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.api.tool_configs import PlanConfig
from accel_sft.memory.estimate import COMPONENTS, Estimate, checkpoint_bytes_each, totals
from accel_sft.memory.flops import peaks
from accel_sft.memory.lengths import Lengths
from accel_sft.memory.shape import ModelShape
from accel_sft.memory.states import FLOAT32, MASTER, MOMENTS
from accel_sft.tools.plan.plans import MARGIN, Plan, PlannedMachine, Refused, made_plans

GIB = 2**30
_COLUMNS = 80
_HEAD = ("launch file", "GPU", "at", "host", "at", "fits", "forward", "sent", "speed")
_UNITS = ("", "GiB", "", "GiB", "", "", "tokens", "GiB/step", "")


@dataclasses.dataclass(frozen=True)
class Answer:
    """What `plan` answers.

    Attributes:
        precisions: those that the launch files compute in.
        best: the recommended plan, `why` it is that, and the `command` that trains under it.
    """

    plans: Sequence[Plan | Refused]
    precisions: Sequence[str]
    shape: ModelShape
    machine: PlannedMachine
    lengths: Lengths
    config: PlanConfig
    best: Plan | None
    why: str
    command: str | None

    def lines(self) -> Iterator[str]:
        """The lines that a terminal shows; the table and the text keep to 80 columns, the command does not."""
        yield from self._head()
        yield ""
        yield from self._table()
        yield ""
        plans = made_plans(self.plans)
        yield from _notes(plans, self.machine)
        for plan in plans if self.config.details or len(self.plans) == 1 else ():
            yield from _details(plan.name, plan.estimate)
        if self.best is None:
            none = "No launch file is recommended: each has a problem, named above."
            yield _text(self._nothing_fits(plans) if plans else none, 0)
            return
        with_more = f" with {self.best.flags} (without, it would {self.best.without})" if self.best.more else ""
        yield _text(f"Recommended: {self.best.name}{with_more}, {self.why}.", 0)
        yield _text(f"Disk: {_disk(self.best, self.config)}.", 0)
        yield from f"{self.command}".splitlines()

    def as_json(self) -> dict[str, Any]:
        """The same as numbers, with memory in bytes."""
        shape = self.shape
        return {
            "model": {"family": shape.family, "parameters": shape.parameters, **shape.by_group},
            "machine": dataclasses.asdict(self.machine),
            "lengths": dataclasses.asdict(self.lengths),
            "plans": [*map(_plan_json, self.plans)],
            "recommended": self.best.name if self.best else None,
            "reason": self.why,
            "command": self.command,
        }

    def _head(self) -> Iterator[str]:
        shape, config, lengths = self.shape, self.config, self.lengths
        trained = shape.trained(config.adapter, config.lora_r, config.lora_target_modules)
        how = "all trained" if config.adapter == "none" else f"frozen, {trained:,} trained ({config.adapter})"
        if config.train_only is not None:
            how = "counted as if all were trained (--train-only)"
        yield _text(f"model    {shape.family}, {shape.parameters:,} parameters, {how}")
        yield _text(f"machine  {self.machine.describe()}; computes in {' or '.join(self.precisions)}")
        yield _text(f"lengths  the longest example has {lengths.longest:,} tokens: {lengths.source}")
        if shape.other and lengths.pixels is None:
            yield _text("images   not counted, as the data has not been tokenized here: start a run once")
        elif lengths.pixels and shape.tower and shape.tower.values:
            yield _text(f"images   up to {lengths.pixels // shape.tower.values:,} patches in one example, of this data")
        elif lengths.pixels:
            yield _text("images   not counted beside their pixels: config.json does not name the vision tower's sizes")

    def _table(self) -> Iterator[str]:
        plans = made_plans(self.plans)
        fastest = min((plan.speed.seconds for plan in plans if plan.fits), default=0.0)
        rows = [_HEAD, _UNITS, *(_row(plan, fastest) for plan in plans)]
        if not self.machine.gpus:
            rows = [(row[0], *row[3:]) for row in rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            columns = zip(row, rows[0], widths, strict=True)
            texts = (f"{text:{'<' if head in ('launch file', 'at') else '>'}{width}}" for text, head, width in columns)
            yield "  ".join(texts).rstrip()
        for plan in self.plans:
            if isinstance(plan, Refused):
                yield _text(f"{plan.name:<{widths[0]}}  {plan.problem}", widths[0] + 2)

    def _nothing_fits(self, plans: Sequence[Plan]) -> str:
        also = "" if self.config.gradient_checkpointing else ", nor does one with --gradient-checkpointing"
        text = f"No launch file fits{also}{self.why.partition('fits')[2]}. {_fix(plans, self.config)}"
        return text + _elsewhere(plans, self.machine)


def _plan_json(plan: Plan | Refused) -> dict[str, Any]:
    if isinstance(plan, Refused):
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
        "speed": dataclasses.asdict(plan.speed),
        "estimate": dataclasses.asdict(plan.estimate),
    }


def _row(plan: Plan, fastest: float) -> tuple[str, ...]:
    estimate, fits = plan.estimate, "no" if plan.over else "barely" if plan.tight else "yes"
    return (
        plan.name,
        _gib(estimate.device_peak_bytes) + "!" * ("device" in plan.over),
        _largest(totals(estimate.device)),
        _gib(estimate.host_needed_bytes) + "!" * ("host" in plan.over),
        _largest(estimate.host_needed),
        f"{fits} {''.join(name[0] for name in plan.more)}".rstrip(),
        f"{plan.largest_tokens:,}" if plan.largest_tokens else "-",
        _gib(plan.speed.sent_bytes),
        f"{fastest / plan.speed.seconds:.2f}" if plan.fits else "-",
    )


def _largest(phases: Mapping[str, float]) -> str:
    return max(phases, key=phases.__getitem__, default="")


def _notes(plans: Sequence[Plan], hardware: PlannedMachine) -> Iterator[str]:
    """What the columns mean, as far as this table has them."""
    if not plans:
        return
    job = plans[0].job
    rows = f" ({job.rows} longest examples)" if job.rows > 1 else " (the longest example)"
    forward = f"a forward of {job.tokens:,} tokens{rows if hardware.gpus else ''}"
    yield _text(f"memory   at its peak phase, with {forward}; host: of all ranks of a machine; !: too little")
    if spare := max(plan.estimate.local_ranks * plan.estimate.spare_bytes for plan in plans):
        room = f"{_gib(spare)} GiB of host memory more let training go on while checkpoints are written"
        yield _text(f"copies   up to {room}; they are left out where there is no room")
    yield _text("fits     in memory; accel-sft doctor says what else a launch file needs")
    if any("gradient_checkpointing" in plan.more for plan in plans):
        yield _text("g        with --gradient-checkpointing")
    if counts := sorted({plan.more["eval_batch_size"] for plan in plans if "eval_batch_size" in plan.more}):
        yield _text(f"e        with --eval-batch-size {', '.join(map(str, counts))}")
    yield _text("forward  the largest that fits, up to a rank's part of a step")
    if any(plan.tight for plan in plans):
        where = "one GPU" if hardware.gpus else "all ranks of this machine"
        yield _text(f"barely   within {1 - MARGIN:.0%} of {where}'s memory; a prediction may err by as much")
    for plan in plans:
        if (machines := plan.job.launch.machines) > 1:
            yield _text(f"{plan.name} on {machines} such machines: memory of one, speed of all")
    device = (
        f"one {hardware.gpu}"
        if peaks(hardware.gpu)
        else "a GPU that is not known, on PCIe"
        if hardware.gpus
        else "CPUs"
    )
    yield _text(f"speed    by a simple model of {device}; only ratios between launch files mean anything")
    for note in dict.fromkeys(note for plan in plans for note in plan.estimate.notes):
        yield _text(f"unknown  {note}")
    yield ""


def _details(name: str, estimate: Estimate) -> Iterator[str]:
    for place, memory in {"one GPU": estimate.device, "one rank's host memory": estimate.host}.items():
        if not memory:
            continue
        yield f"{name}: GiB of {place}"
        heads = [component[:11] for component in COMPONENTS]
        yield f"{'':<10} " + " ".join(f"{head:>{max(len(head), 6)}}" for head in [*heads, "all"])
        for phase, components in memory.items():
            sizes = [components.get(component, 0.0) for component in COMPONENTS]
            texts = [f"{_gib(size):>{max(len(head), 6)}}" for size, head in zip(sizes, heads, strict=True)]
            yield f"{phase:<10} {' '.join(texts)} {_gib(sum(sizes)):>6}"
        yield ""


def _text(text: str, indent: int = 9) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _elsewhere(plans: Sequence[Plan], hardware: PlannedMachine) -> str:
    """A hint to give --host-memory, if a plan with GPUs fails only for this machine's free host memory; else ""."""
    if not (hardware.gpus and hardware.is_free and any(plan.over == ("host",) for plan in plans)):
        return ""
    free = f"{hardware.host_bytes / GIB:.0f} GiB of host memory are what is free on this machine now"
    return f" {free}: --host-memory gives that of another."


def _fix(plans: Sequence[Plan], config: PlanConfig) -> str:
    ways = []
    if config.micro_batch_size not in ("auto", "1"):
        ways.append("--micro-batch-size auto")
    ways += ["a lower --max-length", "a smaller model"]
    short = any("device" in plan.over for plan in plans)
    host = "fewer processes (each needs some), or more host memory, which alone is short"
    ways.append("or more GPUs" if short else host)
    return f"Try {', '.join(ways)}."


def _disk(plan: Plan, config: PlanConfig) -> str:
    """What a run under this plan writes, and moves in a step."""
    job, keep = plan.job, str(config.keep_checkpoints)
    parts = [f"best/ and final/ {_gib(job.stored_bytes * (job.trained if job.is_frozen else job.parameters))} GiB each"]
    if job.saves:
        size = checkpoint_bytes_each(job.ema_decay is not None) * job.trained
        at_once = f", {int(keep) + 1} at once" if keep.isdecimal() else ""
        parts.append(f"a checkpoint {_gib(size)} GiB{at_once} (--keep-checkpoints {keep})")
    swapped: float = (MASTER + MOMENTS + FLOAT32) * job.trained * (job.launch.offload("optimizer") == "nvme")
    swapped += job.computes_bytes * job.parameters * (job.launch.offload("param") == "nvme")
    if swapped := swapped * job.local_ranks / job.ranks:
        moved = _gib(plan.speed.host_bytes * job.local_ranks)
        parts.append(f"{_gib(swapped)} GiB on the NVMe drive, to and from which a step moves {moved} GiB")
    return "; ".join(parts)


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:,.0f}" if gib >= 999.5 else f"{gib:.1f}" if gib >= 9.95 else f"{gib:.2f}"
