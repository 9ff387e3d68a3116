"""A beat wherever a rank's program gets on; `watch` looks how long ago the last one was. Standard library only."""

from __future__ import annotations

_beats = 0


def heartbeat() -> None:
    """The calling program gets on."""
    global _beats
    _beats += 1


def heartbeat_count() -> int:
    """How many there were; that the number changes is all it says."""
    return _beats
