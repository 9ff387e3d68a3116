"""A checkpoint's file has the bytes that were hashed, past the page cache or not, and what fails is said."""

from __future__ import annotations

import errno
import hashlib
import os
import random

import pytest

from accel_sft.io import hashed_file
from accel_sft.io.hashed_file import write_hashed

SIZES = (0, 1, 4095, 4096, 4097, hashed_file._BLOCK - 1, hashed_file._BLOCK, 2 * hashed_file._BLOCK + 5)


def parts(content):
    """The content in pieces of any length, empty ones too."""
    draw, view = random.Random(0), memoryview(content)
    while view:
        length = draw.choice((0, 1, 7, 5000, 3 << 20))
        yield view[:length]
        view = view[length:]


def is_whole(path, size):
    content = random.Random(size).randbytes(size)
    told = write_hashed(path, parts(content))
    assert told == (size, hashlib.sha256(content).hexdigest())
    assert path.read_bytes() == content


@pytest.mark.parametrize("size", SIZES)
def test_the_file_has_the_bytes_that_were_hashed(tmp_path, size):
    is_whole(tmp_path / "file", size)


def test_a_file_system_without_direct_writes_gets_an_ordinary_file(tmp_path, monkeypatch):
    refused, direct, write = [], [True], os.write

    def odd(descriptor, block):
        if direct[0]:
            refused.append(len(block))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(descriptor, block)

    turn = hashed_file._set_direct

    def turned(descriptor, on):
        turn(descriptor, on)
        direct[0] = on

    monkeypatch.setattr(hashed_file, "_set_direct", turned)
    monkeypatch.setattr(os, "write", odd)
    is_whole(tmp_path / "file", SIZES[-1])
    assert len(refused) == 1


def test_a_disk_that_takes_a_part_of_a_block_gets_the_rest(tmp_path, monkeypatch):
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, block: write(descriptor, block[: min(len(block), 4096 * 300)]))
    is_whole(tmp_path / "file", SIZES[-1])


def test_a_write_that_fails_is_said(tmp_path, monkeypatch):
    def full(descriptor, block):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space left"):
        write_hashed(tmp_path / "file", [memoryview(b"some")])


def test_a_file_that_others_may_read_is_one(tmp_path):
    before = os.umask(0o022)
    write_hashed(tmp_path / "file", [memoryview(b"some")])
    os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
