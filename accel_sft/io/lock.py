"""Locks the folder of a run or a comparison for one process at a time. Needs only the standard library."""

import fcntl
import os
import time
from pathlib import Path

from accel_sft.api.errors import UserError

LOCK_SECONDS = 8
"""Seconds to wait for a locked folder, as its process may be about to end: ranks end seconds after their launcher."""
_locked: list[int] = []
"""Descriptors of the folders that this process locked."""


def lock(path: Path) -> None:
    """Lock the folder itself until this process ends, however it ends; nothing is written into it.

    The system drops the lock when all copies of the descriptor are closed, so a forked child closes its copy: otherwise
    a task's process pool that outlives a killed run would keep the folder locked, and no resume could start.
    """
    descriptor = os.open(path, os.O_RDONLY)
    _locked.append(descriptor)
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                raise UserError(f"--output-dir {path}: another process is working in this folder; end it") from None
            time.sleep(0.2)
        except OSError:  # a file system without locks
            return None


def is_locked(path: Path) -> bool:
    """Whether a process of this machine has locked the folder; always False on a file system without locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def release() -> None:
    """Unlock every folder that this process locked."""
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=release)
