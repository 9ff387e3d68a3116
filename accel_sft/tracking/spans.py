"""Marks what the training process does: as spans in a profiler's trace, and by the seconds spent in each."""

import contextlib
import time
from collections import Counter
from collections.abc import Iterator

import torch

from accel_sft.tracking.trace import PREFIX

_seconds: Counter[str] = Counter()
_times: Counter[str] = Counter()


@contextlib.contextmanager
def span(name: str) -> Iterator[None]:
    """Inside, the process does `name`, one of `trace.SPANS`; also a decorator. It costs some microseconds."""
    began = time.perf_counter()
    try:
        with torch.profiler.record_function(PREFIX + name):
            yield
    finally:
        _seconds[name] += time.perf_counter() - began
        _times[name] += 1


def taken() -> tuple[Counter[str], Counter[str]]:
    """Seconds spent in each span since the last call, and how often each began, by name."""
    counted = Counter(_seconds), Counter(_times)
    _seconds.clear()
    _times.clear()
    return counted
