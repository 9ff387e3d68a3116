"""Runs a program for another process, and ends it when that process is gone. Standard library only.

`python -m accel_sft.evaluation.supervise PROGRAM ARGUMENT...`, with a pipe as standard input that nothing is written:
the system closes it when the process at its other end does, or ends, however that happens. A signal handler cannot
promise that.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

GRACE_SECONDS, HELPERS_SECONDS = 10, 2
"""What the program has to leave by itself, and what its helpers have to clear up behind it, before all are killed."""


def main() -> int:
    """Exit status of the program as a shell reports it; it and all that it started in its session are gone then."""
    program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True)
    while program.poll() is None and not select.select([sys.stdin], [], [], 0.2)[0]:
        pass
    _signal(program.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        program.wait(GRACE_SECONDS)
    until = time.monotonic() + HELPERS_SECONDS
    while _signal(program.pid, 0) and time.monotonic() < until:
        time.sleep(0.05)
    _signal(program.pid, signal.SIGKILL)
    status = program.wait()
    return status if status >= 0 else 128 - status


def _signal(group: int, number: int) -> bool:
    """Whether there was anyone in the group to get it."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):  # gone, or on macOS a zombie
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
