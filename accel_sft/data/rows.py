"""Reads rows of a JSON or JSON Lines file: all are checked at the first reading, each is parsed when it is used.

The place of each row is kept in the cache, found by the file's content and the parser. Standard library only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import operator
import os
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

from accel_sft.api.errors import UserError
from accel_sft.data import cache
from accel_sft.data.bad_rows import BadRow, Place, left_out_rows
from accel_sft.data.fingerprint import code_fingerprint
from accel_sft.data.json_stream import RowProblem, located

MAX_PROBLEMS = 20
MAX_PIPED_BYTES = 1 << 30
"""What comes through a pipe is held in memory, and may have no end."""
IN_MEMORY_BYTES = 1 << 20
"""Smaller files are held in memory and checked at every start: that takes no longer than a look into the cache."""
_PLACE = struct.Struct("<qII")  # a row's first byte in the file, number of bytes, and their CRC-32
_PLACES = "places.bin"
_CHUNK_BYTES = 1 << 20
Row = TypeVar("Row")


class _File:
    """An open file that is sliced as `bytes` are; closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __len__(self) -> int:
        return os.fstat(self._descriptor).st_size

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)

    def __del__(self) -> None:
        os.close(self._descriptor)


@dataclasses.dataclass(eq=False, repr=False)
class Rows(Sequence[Row]):
    """The rows of a file as a sequence that has none of them in memory: each is read and parsed when it is used.

    A slice is such a sequence too; `list(rows)` has them all in memory.
    """

    _name: str
    _file: _File | bytes
    _places: _File | bytes
    _parse: Callable[[dict[str, Any]], Row]
    _chosen: range
    _content: str | None
    _complete: bool = True

    @property
    def file(self) -> str:
        """The file's name, as it was given."""
        return self._name

    def places(self, indices: Sequence[int]) -> list[Place]:
        """Where these rows stand in the file, of which as much as is needed is read once."""
        rows = [self._chosen[index] for index in indices]
        lines: dict[int, int] = {}
        at, line = 0, 1
        for number in sorted({each for row in rows for each in (row - 1, row) if each >= 0}):
            begin, _, _ = self._place(number)
            while at < begin:
                end = min(at + _CHUNK_BYTES, begin)
                line += self._file[at:end].count(b"\n")
                at = end
            lines[number] = line
        alone = {row: lines.get(row - 1) != lines[row] for row in rows}
        return [Place(self._name, lines[row], None if alone[row] or not self._complete else row + 1) for row in rows]

    def _place(self, row: int) -> tuple[int, int, int]:
        return _PLACE.unpack(self._places[row * _PLACE.size : (row + 1) * _PLACE.size])

    @property
    def fingerprint(self) -> str | None:
        """The same for the same rows and parser; None: the parser has none, see `code_fingerprint`."""
        chosen = self._chosen
        return self._content and f"{self._content} {chosen.start} {chosen.step} {len(chosen)}"

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Rows[Row]:
        row = self._chosen[index]
        if isinstance(row, range):
            return dataclasses.replace(self, _chosen=row)
        begin, size, checksum = self._place(row)
        raw = self._file[begin : begin + size]
        if zlib.crc32(raw) != checksum:
            raise UserError(f"{self._name}: row {row + 1} was changed while it was in use; start again")
        return self._parse(json.loads(raw))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, Rows)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def __repr__(self) -> str:
        return f"<{len(self):,} rows of {self._name}>"


def read_rows(path: str | Path, parse: Callable[[dict[str, Any]], Row]) -> Rows[Row]:
    """Read a JSON array of objects or JSON Lines (told apart by content, not by name) and parse every row once.

    Args:
        path: the file, UTF-8 (a byte-order mark is accepted).
        parse: turns an object into an example, or raises RowProblem; a pure function, called again for each use.
    Returns:
        The examples. Of a large file each is read again whenever it is used, so that a million take no memory.
    Raises:
        UserError: the file cannot be read, holds no row, or has bad rows: the first twenty, by file, line and field.
    """
    path, known = Path(path), code_fingerprint(parse)
    try:
        stream = path.open("rb")
        before = os.fstat(stream.fileno())
        regular = stat.S_ISREG(before.st_mode)
        if not regular and not stat.S_ISFIFO(before.st_mode):
            raise UserError(f"{path}: a device, not a file; give a JSON or JSONL file")
        held = before.st_size < IN_MEMORY_BYTES or not regular  # what is piped in is read once
        most = -1 if regular else MAX_PIPED_BYTES + 1
        file = stream.read(most) if held else _File(os.dup(stream.fileno()))
        if not regular and len(file) > MAX_PIPED_BYTES:
            raise UserError(f"{path}: more than {MAX_PIPED_BYTES >> 20} MiB come through a pipe; give a file instead")
        source = io.BytesIO(file) if held else stream
        key = hashlib.sha256(f"{hashlib.file_digest(source, 'sha256').hexdigest()} {known}".encode()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing JSON or JSONL file") from None
    except ValueError as error:  # the name has a NUL or a lone surrogate
        raise UserError(f"{str(path)!r}: not a file's name ({error}); give an existing JSON or JSONL file") from None
    with stream:
        kept = not held and known is not None
        places, complete = _kept(key) if kept else None, True
        if places is None:
            places, complete = _validated(source, str(path), parse)
            after = os.fstat(stream.fileno())
            if not held and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UserError(f"{path}: was changed while it was read; start again")
            places = _keep(places, key) if kept and complete else places
    return Rows(str(path), file, places, parse, range(len(places) // _PLACE.size), known and key, complete)


def _validated(stream: BinaryIO, name: str, parse: Callable[[dict[str, Any]], Any]) -> tuple[bytes, bool]:
    """The place of each row, one after the other, and whether that is all of them."""
    places, problems, bad, before, left_out = bytearray(), [], 0, 0, left_out_rows()
    for row, (value, line, begin, raw) in enumerate(located(stream, name), 1):
        try:
            if isinstance(value, ValueError):
                raise value
            if not isinstance(value, dict):
                raise RowProblem("(row)", f"a JSON object, got {type(value).__name__}")
            parse(value)
            places += _PLACE.pack(begin, len(raw), zlib.crc32(raw))
        except ValueError as problem:
            bad += 1
            place = Place(name, line, row if raw and line == before else None)  # an array may stand on one line
            if left_out is not None:
                left_out.append(BadRow(place, str(problem), isinstance(value, ValueError)))
            elif bad <= MAX_PROBLEMS:
                where = f"{name}:{line}:" + (f" row {row}:" if place.row else "")
                problems.append(f"{where} {problem}")
        before = line
    if left_out is None and bad > MAX_PROBLEMS:
        problems.append(f"{name}: and {bad - MAX_PROBLEMS} more bad rows; nothing was trained")
    if problems:
        raise UserError(*problems)
    if not places:
        raise UserError(f"{name}: no rows; expected a JSON array of objects or one JSON object per line")
    return bytes(places), not bad


def _kept(key: str) -> _File | None:
    if found := cache.find("rows", key):
        with contextlib.suppress(OSError):  # it may be removed by now
            return _File(os.open(found[0] / _PLACES, os.O_RDONLY))
    return None


def _keep(places: bytes, key: str) -> _File | bytes:
    """Put `places` into the cache. If it cannot be written they stay in memory, and the next start checks all rows."""
    try:
        with cache.partial("rows") as made:
            (made / _PLACES).write_bytes(places)
            cache.publish(made, "rows", key, {})
    except OSError as error:
        cache.log(f"{cache.folder()}: rows cannot be kept here ({error.strerror}); they are checked on every start")
    return _kept(key) or places
