"""Reads from a trace of `--profile` where the time of the traced steps went. No torch."""

import bisect
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

SPANS = BATCHES, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, PAUSE = (
    "make batch",
    "forward",
    "backward",
    "wait for ranks",
    "optimizer step",
    "evaluate or save",
)
"""What the training process does, by the names of its spans in a trace."""
PREFIX = "accel_sft: "
"""Prefix of these names in a trace: libraries have spans called `forward` too."""
COPIES, IDLE, OTHER = "copies", "idle", "other"
_KINDS = {"user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime", "cuda_driver"}
_EVENTS, _BETWEEN, _CHUNK = '"traceEvents": [', re.compile(r"[\s,]*"), 1 << 20
_EXCHANGES = re.compile(r"(gloo|nccl|mpi|ccl|ucc):|c10d::")
"""Names of events on the host that last from the beginning of an exchange between ranks until it has arrived."""
_WORDS = {
    BATCHES: "reading rows and making batches",
    FORWARD: "forward",
    BACKWARD: "backward",
    COMMUNICATION: "communication, waiting for other ranks included",
    OPTIMIZER: "optimizer",
    COPIES: "copies",
    OTHER: "the rest",
}


def time_spent(path: Path) -> dict[str, Any] | None:
    """What the traced steps of one rank took, in seconds; None if the file holds no whole step.

    At every instant one thing counts, so that the parts add up to the whole. Evaluations and checkpoints are left out.

    Returns:
        `steps`, their number; `seconds`, all of their time; and `process`, the seconds by what the process did. The
        time from a step's beginning to its first batch counts as making batches; an exchange that overlaps with
        computation counts as that computation. With a GPU also `device`, the seconds by what the GPU did: a kernel
        counts for the span that launched it, communication and copies count while no kernel of the model runs. And
        `idle`, the seconds in which nothing ran on the GPU, by what the process did.
    """
    try:
        events = list(_events(path))
    except (OSError, ValueError):  # the run was killed while it wrote
        return None
    spans = [event for event in events if event.kind == "user_annotation"]
    own = {name: sorted((each.begin, each.end) for each in spans if each.name == PREFIX + name) for name in SPANS}
    begins = [begin for begin, _ in own[BATCHES]]
    steps = []
    for step in (span for span in spans if span.name.startswith("ProfilerStep")):
        at = bisect.bisect_left(begins, step.begin)
        if at < len(begins) and begins[at] < step.end:  # else training ended with the step before
            own[BATCHES].append((step.begin, begins[at]))
            steps.append(step)
    if not steps:
        return None
    marks = [(begin, end, name) for name, found in own.items() for begin, end in found]
    marks += [(step.begin, step.end, "step") for step in steps]
    marks += _host_exchanges(events, steps[0].thread)
    on_device = _device_work(events, own)
    found: Counter[tuple[str, str]] = Counter()
    for seconds, active in _stretches([*marks, *on_device]):
        if active["step"] and not active[PAUSE]:
            found[_of_process(active), _of_device(active)] += seconds
    spent: dict[str, Any] = {"steps": len(steps), "seconds": sum(found.values()), "process": _summed(found, 0)}
    if on_device:
        spent["device"] = _summed(found, 1)
        spent["idle"] = _summed(Counter({each: found[each] for each in found if each[1] == IDLE}), 0)
    return spent


def batch_share(folder: Path) -> dict[str, float] | None:
    """The traced `steps` of one rank, their `step_seconds`, and the `batch_seconds` in them; None without a trace.

    Making batches includes their copy to the device.
    """
    for path in sorted(folder.glob("*.pt.trace.json")):
        if spent := time_spent(path):
            batches = spent["process"].get(BATCHES, 0.0)
            return {"steps": spent["steps"], "step_seconds": spent["seconds"], "batch_seconds": batches}
    return None


def time_sentence(spent: Mapping[str, Any]) -> str:
    """`time_spent` in a sentence, with `rank` and `ranks` beside it; its percentages add up to 100."""
    count = f"{spent['steps']} traced step{'s' if spent['steps'] > 1 else ''}"
    whose = f" of rank {spent['rank']}" if spent["ranks"] > 1 else ""
    where = "on the GPU" if "device" in spent else "in the process"
    alone = spent["ranks"] == 1
    told = _listed(spent.get("device") or spent["process"], alone=alone)
    if idle := spent.get("device", {}).get(IDLE):
        during = _listed(spent["idle"], alone=alone)
        told += f"; while it was idle ({idle / spent['steps']:.3g} s a step), the process spent its time on {during}"
    return f"where the time of {count}{whose} went {where} ({spent['seconds'] / spent['steps']:.3g} s each): {told}"


def _listed(parts: Mapping[str, float], *, alone: bool) -> str:
    """The parts in percent, the largest first; what rounding down leaves goes to the parts that lose most by it. If the
    rank is `alone`, communication is part of the rest: there is nobody to wait for."""
    if alone and COMMUNICATION in parts:
        parts = {**parts, OTHER: parts.get(OTHER, 0.0) + parts[COMMUNICATION], COMMUNICATION: 0.0}
    total = sum(parts.values())
    whole = {name: int(100 * part / total) for name, part in parts.items()}
    lost = sorted(parts, key=lambda name: whole[name] - 100 * parts[name] / total)
    for name in lost[: 100 - sum(whole.values())]:
        whole[name] += 1
    shown = sorted((name for name in whole if whole[name]), key=lambda name: -whole[name])
    return ", ".join(f"{whole[name]}% {_WORDS.get(name, name)}" for name in shown)


def _of_process(active: Mapping[str, int]) -> str:
    if active[COMMUNICATION] or (active["exchange"] and not active["operator"]):
        return COMMUNICATION
    return next((name for name in (BATCHES, FORWARD, BACKWARD, OPTIMIZER) if active[name]), OTHER)


def _of_device(active: Mapping[str, int]) -> str:
    kernels = (FORWARD, BACKWARD, OPTIMIZER, BATCHES, OTHER)
    places = [*((f"kernel: {name}", name) for name in kernels), (f"kernel: {COMMUNICATION}", COMMUNICATION)]
    return next((name for mark, name in [*places, (COPIES, COPIES)] if active[mark]), IDLE)


class _Event(NamedTuple):
    """An event of a trace, with times in seconds."""

    kind: str
    name: str
    begin: float
    end: float
    thread: tuple[Any, Any]
    correlation: Any


def _events(path: Path) -> Iterator[_Event]:
    """The events of a trace that are used here, read piece by piece: a trace may be larger than the model.

    Raises:
        ValueError: the file is no trace, or was cut off.
    """
    decode, text, at = json.JSONDecoder().raw_decode, "", 0
    with path.open(encoding="utf-8") as file:
        while (at := text.find(_EVENTS)) < 0:
            if not (more := file.read(_CHUNK)):
                raise ValueError(f"{path}: no events")
            text += more
        at += len(_EVENTS)
        while True:
            at = _BETWEEN.match(text, at).end()
            if text[at : at + 1] == "]":
                return
            try:
                event, at = decode(text, at)
            except ValueError:
                if not (more := file.read(_CHUNK)):
                    raise
                text, at = text[at:] + more, 0
                continue
            kind, name = event.get("cat"), event.get("name", "")
            if kind in _KINDS or (kind == "cpu_op" and (name.startswith("aten::") or _EXCHANGES.match(name))):
                begin, thread = event["ts"] / 1e6, (event["pid"], event["tid"])
                correlation = event.get("args", {}).get("correlation")
                yield _Event(kind, name, begin, begin + event.get("dur", 0) / 1e6, thread, correlation)


def _host_exchanges(events: Sequence[_Event], thread: tuple[Any, Any]) -> list[tuple[float, float, str]]:
    """The exchanges on this process's host and, if there are any, the operators that its main thread computes."""
    on_host = [event for event in events if event.kind in ("cpu_op", "user_annotation")]
    marks = [(each.begin, each.end, "exchange") for each in on_host if _EXCHANGES.match(each.name)]
    if marks:
        computing = (each for each in on_host if each.name.startswith("aten::") and each.thread == thread)
        marks += [(each.begin, each.end, "operator") for each in computing]
    return marks


def _device_work(
    events: Sequence[_Event], own: Mapping[str, Sequence[tuple[float, float]]]
) -> list[tuple[float, float, str]]:
    """What runs on the GPU: copies, and kernels by the span in which they were launched."""
    launches = {event.correlation: event.begin for event in events if event.kind in ("cuda_runtime", "cuda_driver")}
    places = sorted((begin, end, name) for name in (BATCHES, FORWARD, BACKWARD, OPTIMIZER) for begin, end in own[name])
    starts = [begin for begin, _, _ in places]

    def launched_in(kernel: _Event) -> str:
        if "nccl" in kernel.name.lower():
            return COMMUNICATION
        at = launches.get(kernel.correlation, kernel.begin)
        place = bisect.bisect_right(starts, at) - 1
        return places[place][2] if place >= 0 and at < places[place][1] else OTHER

    kernels = [(each.begin, each.end, f"kernel: {launched_in(each)}") for each in events if each.kind == "kernel"]
    return kernels + [(each.begin, each.end, COPIES) for each in events if each.kind in ("gpu_memcpy", "gpu_memset")]


def _stretches(marks: Sequence[tuple[float, float, str]]) -> Iterator[tuple[float, Counter[str]]]:
    """Yield each stretch of time in which the same marks are active: its seconds, and how often each mark is active."""
    edges = sorted((at, change, name) for begin, end, name in marks for at, change in ((begin, 1), (end, -1)))
    active: Counter[str] = Counter()
    before = edges[0][0]
    for at, change, name in edges:
        if at > before:
            yield at - before, active
        active[name] += change
        before = at


def _summed(found: Mapping[tuple[str, str], float], side: int) -> dict[str, float]:
    parts: Counter[str] = Counter()
    for names, seconds in found.items():
        parts[names[side]] += seconds
    return dict(parts)
