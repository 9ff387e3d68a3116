"""Writes a file to the disk and hashes it in the same pass. Needs only the standard library."""

import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
from collections.abc import Iterable
from pathlib import Path

from accel_sft.io.heartbeat import heartbeat

_DIRECT = getattr(os, "O_DIRECT", 0)  # macOS has none
_BLOCK = 4 << 20
_SECTOR = 4096
"""Bytes of which a direct write takes a multiple; no disk has larger sectors."""
_SLICE = 1 << 20
"""Bytes copied at once: Python's other threads wait meanwhile, a tenth of a millisecond."""


def write_hashed(path: Path, parts: Iterable[memoryview]) -> tuple[int, str]:
    """Write the bytes of `parts` to a new file, on the disk when this returns; returns its size and SHA-256.

    It goes past the page cache (O_DIRECT): filling that takes the kernel about as long as hashing, on cores that
    training needs, for data that is read only after a stop. Where a file system has no such writes, it is written as
    others are.

    Raises:
        OSError: the file cannot be written.
    """
    digest, size, filled = hashlib.sha256(), 0, 0
    block = memoryview(mmap.mmap(-1, _BLOCK))  # aligned, as direct writes ask
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        with contextlib.suppress(OSError):
            _set_direct(descriptor, True)
        for part in parts:
            while part:
                count = min(len(part), _BLOCK - filled, _SLICE)
                block[filled : filled + count] = part[:count]
                part, filled, size = part[count:], filled + count, size + count
                if filled == _BLOCK:
                    digest.update(block)
                    _write(descriptor, block)
                    filled = 0
        digest.update(block[:filled])
        _write(descriptor, block[: -(-filled // _SECTOR) * _SECTOR])
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


def _write(descriptor: int, block: memoryview) -> None:
    heartbeat()
    while block:
        try:
            block = block[os.write(descriptor, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not fcntl.fcntl(descriptor, fcntl.F_GETFL) & _DIRECT:
                raise
            # the file system takes the flag and no such write, or the disk took a part of a block and its rest is odd
            _set_direct(descriptor, False)


def _set_direct(descriptor: int, on: bool) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT if on else flags & ~_DIRECT)
