"""Limits of time, longer on a slow or busy machine by how long Python and torch take to start on it.

Each is many times what the reference machine needs. What only guards against a hang has none: the test's own is enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

REFERENCE_SECONDS = 2.0
"""Time in which Python and torch start on a quiet core, with files that were read before."""
SLOWNESS = "TESTS_SLOWNESS"
"""Environment variable with the machine's time in units of the reference's, at least 1: measured once for a session."""


def measure() -> None:
    """Measure the machine, unless this process was started by one that has."""
    if SLOWNESS not in os.environ:
        seconds = _start()
        if seconds > REFERENCE_SECONDS:  # files had to be read from the disk, or compiled to bytecode
            seconds = min(seconds, _start())
        os.environ[SLOWNESS] = str(max(1.0, seconds / REFERENCE_SECONDS))


def _start() -> float:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


def limit(seconds: float) -> float:
    """Return the time on this machine that stands for `seconds` on the reference machine."""
    return seconds * float(os.environ.get(SLOWNESS, 1))


def wait_for(condition: Callable[[], object], seconds: float = 240) -> None:
    """Wait until the condition holds; fail after `limit(seconds)`."""
    until = time.monotonic() + limit(seconds)
    while not condition():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)
