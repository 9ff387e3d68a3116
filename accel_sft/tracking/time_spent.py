"""Records what the training process does: as spans in a profiler's trace, and as seconds spent in each span."""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

BATCHES, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, PAUSE = (
    "make batch",
    "forward",
    "backward",
    "wait for ranks",
    "optimizer step",
    "evaluate or save",
)
"""Names of the spans in a trace: what the training process does in each."""
_REST = "the rest"
_PREFIX = "accel_sft: "
"""Prefix of these names in a trace: libraries have spans called `forward` too."""
_seconds: defaultdict[str, float] = defaultdict(float)
_times: Counter[str] = Counter()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Context manager and decorator for work called `name`, one of the names above. It costs some microseconds."""
    import torch  # here, because reports need only the names

    began = time.perf_counter()
    try:
        with torch.profiler.record_function(_PREFIX + name):
            yield
    finally:
        _seconds[name] += time.perf_counter() - began
        _times[name] += 1


def taken() -> tuple[dict[str, float], dict[str, int]]:
    """Return the seconds spent in each span since the last call, and how often each span was entered, by name."""
    counted = dict(_seconds), dict(_times)
    _seconds.clear()
    _times.clear()
    return counted


class TimeSpent:
    """Adds up the time of the steps since this start or resume, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self.steps, self.seconds = 0, 0.0
        self.parts: defaultdict[str, float] = defaultdict(float)

    def add(self, step_seconds: float, spans: Mapping[str, float]) -> None:
        """Count a step, and how many of its seconds were spent in each span."""
        self.steps += 1
        self.seconds += step_seconds
        for name, seconds in spans.items():
            if name != PAUSE:
                self.parts[name] += seconds

    def totals(self) -> dict[str, Any] | None:
        """Return the number of `steps`, the `seconds` they took, and in `parts` how many of these each span took; None
        before the first step."""
        if not self.seconds:
            return None
        rest = max(self.seconds - sum(self.parts.values()), 0.0)
        return {"steps": self.steps, "seconds": self.seconds, "parts": {**self.parts, _REST: rest}}
