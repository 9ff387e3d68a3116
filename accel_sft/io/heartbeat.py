"""Heartbeats: the program calls one wherever it makes progress, and the watchdog counts them. Standard library only."""

import contextlib
from collections.abc import Iterator

_beats = 0
_only = False


def heartbeat() -> None:
    """Note that the calling program made progress."""
    global _beats
    _beats += 1


def heartbeat_count() -> int:
    """Heartbeats so far; only that the number changes has a meaning."""
    return _beats


@contextlib.contextmanager
def heartbeats_only() -> Iterator[None]:
    """Inside, only heartbeats count as progress; CPU and disk activity do not."""
    global _only
    heartbeat()
    before, _only = _only, True
    try:
        yield
    finally:
        _only = before


def activity_counts() -> bool:
    """Whether CPU and disk activity is progress now."""
    return not _only
