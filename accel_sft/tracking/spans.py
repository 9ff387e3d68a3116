"""Marks what the training process does: as spans in a profiler's trace, and by the seconds spent in each."""

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import torch

_PREFIX = "accel_sft: "
"""Prefix of these names in a trace: libraries have spans called `forward` too."""

_seconds: defaultdict[str, float] = defaultdict(float)
_times: Counter[str] = Counter()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Inside, the process does `name`, one of those in time_spent.py; also a decorator. It costs some microseconds."""
    began = time.perf_counter()
    try:
        with torch.profiler.record_function(_PREFIX + name):
            yield
    finally:
        _seconds[name] += time.perf_counter() - began
        _times[name] += 1


def taken() -> tuple[dict[str, float], dict[str, int]]:
    """Return, by name, the seconds spent in each span since the last call, and how often each was entered and left."""
    counted = dict(_seconds), dict(_times)
    _seconds.clear()
    _times.clear()
    return counted
