"""Writes plans in words or as JSON: a table of launch files, a launch's phases by component, the recommendation."""

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from accel_sft.api.tool_configs import PlanConfig
from accel_sft.memory.estimate import COMPONENTS, Estimate, checkpoint_bytes_each, totals
from accel_sft.memory.lengths import Lengths
from accel_sft.memory.shape import ModelShape
from accel_sft.memory.states import FLOAT32, MASTER, MOMENTS
from accel_sft.tools.plan.plans import MARGIN, Plan, PlannedMachine, Refused

GIB = 2**30
_COLUMNS = 80
_HEAD = ("launch file", "GPU", "at", "host", "at", "fits", "forward", "sent", "speed")
_UNITS = ("", "GiB", "", "GiB", "", "", "tokens", "GiB/step", "")
_LEGEND = (
    "memory   at the peak phase, with {forward}; host: of all ranks of a machine; !: too little memory",
    "fits     g: with --gradient-checkpointing; e: with a smaller --eval-batch-size; barely: less than {margin:.0%} "
    "of a memory stays free, and a prediction may err by as much",
    "forward  the largest that fits, up to a rank's part of a step",
    "speed    by a simple model; only ratios between launch files mean anything",
)


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of `plan`: the plans, the `best` one, `why` it is recommended, and the `command` to train under it."""

    plans: Sequence[Plan | Refused]
    shape: ModelShape
    machine: PlannedMachine
    lengths: Lengths
    config: PlanConfig
    best: Plan | None
    why: str
    command: str | None

    def lines(self) -> Iterator[str]:
        """The lines that a terminal shows; the table and the text keep to 80 columns, the command does not."""
        plans = [plan for plan in self.plans if isinstance(plan, Plan)]
        yield from self._head(plans)
        yield ""
        yield from self._table(plans)
        yield ""
        if plans:
            job = plans[0].job
            forward = f"a forward of {job.tokens:,} tokens ({job.rows} longest examples)"
            yield from (_text(line.format(forward=forward, margin=1 - MARGIN)) for line in _LEGEND)
            yield from dict.fromkeys(_text(f"unknown  {note}") for plan in plans for note in plan.estimate.notes)
            yield ""
        for plan in plans if self.config.details or len(self.plans) == 1 else ():
            yield from _details(plan.name, plan.estimate)
        if self.best is None:
            ways = "--adapter lora, " * (self.config.adapter == "none")
            ways += "--micro-batch-size auto, a lower --max-length, a smaller model, or more GPUs or host memory"
            none = "No launch file is recommended: each has a problem, named above."
            yield _text(f"{self.why[0].upper()}{self.why[1:]}. Try {ways}." if plans else none, 0)
            return
        yield _text(f"Recommended: {self.best.name}{f' with {self.best.flags}' * bool(self.best.more)}, {self.why}.", 0)
        yield _text(f"Disk: {_disk(self.best, self.config)}.", 0)
        yield from f"{self.command}".splitlines()

    def as_json(self) -> dict[str, Any]:
        """The answer as numbers, with memory in bytes."""
        shape = self.shape
        return {
            "model": {"family": shape.family, "parameters": shape.parameters},
            "machine": dataclasses.asdict(self.machine),
            "lengths": dataclasses.asdict(self.lengths),
            "plans": [*map(_plan_json, self.plans)],
            "recommended": self.best.name if self.best else None,
            "reason": self.why,
            "command": self.command,
        }

    def _head(self, plans: Sequence[Plan]) -> Iterator[str]:
        shape, config, lengths, machine = self.shape, self.config, self.lengths, self.machine
        trained = shape.trained(config.adapter, config.lora_r, config.lora_target_modules)
        how = "all trained" if config.adapter == "none" else f"frozen, {trained:,} trained ({config.adapter})"
        if config.train_only is not None:
            how = "counted as if all were trained (--train-only)"
        precisions = sorted({plan.job.precision.replace("no", "float32") for plan in plans})
        computes = f"; computes in {' or '.join(precisions)}" if plans else ""
        yield _text(f"model    {shape.family}, {shape.parameters:,} parameters, {how}")
        gpus = f"{machine.gpus} GPU of {machine.gpu_bytes / GIB:.0f} GiB" if machine.gpu_bytes else "no GPU"
        yield _text(f"machine  {gpus}, {machine.host_bytes / GIB:.0f} GiB of host memory{computes}")
        yield _text(f"lengths  the longest example has {lengths.longest:,} tokens: {lengths.source}")
        if shape.other and not (lengths.pixels and shape.tower and shape.tower.values):
            yield _text("images   not counted: the data was not tokenized here, or config.json names no tower sizes")

    def _table(self, plans: Sequence[Plan]) -> Iterator[str]:
        fastest = min((plan.speed.seconds for plan in plans if plan.fits), default=0.0)
        rows = [_HEAD, _UNITS, *(_row(plan, fastest) for plan in plans)]
        if not self.machine.gpus:
            rows = [(row[0], *row[3:]) for row in rows]
        yield from _grid(rows, left=("launch file", "at"))
        for plan in self.plans:
            if isinstance(plan, Refused):
                yield _text(f"{plan.name}  {plan.problem}", 2)


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


def _details(name: str, estimate: Estimate) -> Iterator[str]:
    for place, memory in {"one GPU": estimate.device, "one rank's host memory": estimate.host}.items():
        if memory:
            yield f"{name}: GiB of {place}"
            sizes = {phase: [*parts.values(), sum(parts.values())] for phase, parts in memory.items()}
            rows = [(phase, *map(_gib, of_phase)) for phase, of_phase in sizes.items()]
            yield from _grid([("phase", *(name[:11] for name in COMPONENTS), "all"), *rows], left=("phase",), gap=" ")
            yield ""


def _grid(rows: Sequence[Sequence[str]], left: Sequence[str], gap: str = "  ") -> Iterator[str]:
    """The rows as lines of columns: columns whose heads are in `left` are left-aligned, all others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(row, rows[0], widths, strict=True)
        yield gap.join(f"{text:{'<' if head in left else '>'}{width}}" for text, head, width in columns).rstrip()


def _text(text: str, indent: int = 9) -> str:
    return textwrap.fill(text, _COLUMNS, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)


def _disk(plan: Plan, config: PlanConfig) -> str:
    """What a run under this plan writes."""
    job, keep = plan.job, str(config.keep_checkpoints)
    parts = [f"best/ and final/ {_gib(job.stored_bytes * (job.trained if job.is_frozen else job.parameters))} GiB each"]
    if job.saves:
        size = checkpoint_bytes_each(job.ema_decay is not None) * job.trained
        at_once = f", {int(keep) + 1} at once" if keep.isdecimal() else ""
        parts.append(f"a checkpoint {_gib(size)} GiB{at_once} (--keep-checkpoints {keep})")
    swapped: float = (MASTER + MOMENTS + FLOAT32) * job.trained * (job.launch.offload("optimizer") == "nvme")
    swapped += job.computes_bytes * job.parameters * (job.launch.offload("param") == "nvme")
    if swapped:
        parts.append(f"{_gib(swapped * job.local_ranks / job.ranks)} GiB on the NVMe drive")
    return "; ".join(parts)


def _gib(size: float) -> str:
    gib = size / GIB
    return f"{gib:,.0f}" if gib >= 999.5 else f"{gib:.1f}" if gib >= 9.95 else f"{gib:.2f}"
