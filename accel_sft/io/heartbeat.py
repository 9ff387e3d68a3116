"""Heartbeats: the program calls one wherever it makes progress, and the watchdog counts them. Standard library only."""

_beats = 0


def heartbeat() -> None:
    """Note that the calling program made progress."""
    global _beats
    _beats += 1


def heartbeat_count() -> int:
    """Heartbeats so far; only that the number changes has a meaning."""
    return _beats
