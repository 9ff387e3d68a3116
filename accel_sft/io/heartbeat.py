"""Tells the watchdog when the program makes progress (a heartbeat), and when it waits for other ranks.

Needs only the standard library.
"""

import contextlib
from collections.abc import Iterator

_beats = 0
_only = False
_waiting = 0


def heartbeat() -> None:
    """Record that the program made progress."""
    global _beats
    _beats += 1


def heartbeat_count() -> int:
    """Number of heartbeats so far; only its changes have a meaning."""
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
    """Whether CPU and disk activity count as progress now."""
    return not _only


@contextlib.contextmanager
def exchange() -> Iterator[None]:
    """Mark a block, or function, in which the main thread waits for other ranks, directly or through its device."""
    global _waiting
    _waiting += 1
    try:
        yield
    finally:
        _waiting -= 1


def in_exchange() -> bool:
    """Whether the main thread is in an `exchange`."""
    return _waiting > 0
