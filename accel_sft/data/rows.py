"""Rows of a JSON or JSONL file: all checked at the first reading, each parsed when it is asked for.

What the first reading finds out, where each row stands, is kept in the cache by the file's content and the parser.
Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import operator
import os
import shutil
import stat
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, overload

from accel_sft.api.errors import UserError
from accel_sft.data import cache
from accel_sft.data.fingerprint import code_fingerprint
from accel_sft.data.json_stream import Malformed, located
from accel_sft.io import manifest

MAX_PROBLEMS = 20
IN_MEMORY_BYTES = 1 << 20
"""Smaller files are held, and checked on every start: that takes no longer than asking the cache."""
_PLACE = struct.Struct("<qII")  # a row's first byte in the file, number of bytes, and their CRC-32
_PLACES = "places.bin"
Row = TypeVar("Row")


class RowProblem(Malformed):
    """What is wrong with one row: raised by the `parse` given to `read_rows`, which adds file and line.

    Args:
        field: the key, or a path such as `label.name`.
        expected: what should have stood there.
    """


class _File:
    """An open file of which parts are read; closed when nobody refers to it any more."""

    def __init__(self, stream: BinaryIO) -> None:
        self._descriptor = os.dup(stream.fileno())
        self.size = os.fstat(self._descriptor).st_size

    def part(self, begin: int, size: int) -> bytes:
        return os.pread(self._descriptor, size, begin)

    def __del__(self) -> None:
        os.close(self._descriptor)


class _Held:
    """The content of a small file."""

    def __init__(self, content: bytes) -> None:
        self.content, self.size = content, len(content)

    def part(self, begin: int, size: int) -> bytes:
        return self.content[begin : begin + size]


class Rows(Sequence[Row]):
    """The rows of a file as a sequence that holds none of them: each is read and parsed when it is asked for.

    A slice is such a sequence too; `list(rows)` holds them all.

    Attributes:
        fingerprint: the same for the same rows and parser; None: the parser cannot be told from another one (it was
            made inside a function, or holds what is no plain value).
    """

    def __init__(
        self,
        name: str,
        file: _File | _Held,
        places: _File | _Held,
        parse: Callable[[dict[str, Any]], Row],
        chosen: range,
        content: str | None,
    ) -> None:
        self._name, self._file, self._places, self._parse = name, file, places, parse
        self._chosen, self._content = chosen, content

    @property
    def fingerprint(self) -> str | None:
        chosen = self._chosen
        return self._content and f"{self._content} {chosen.start} {chosen.step} {len(chosen)}"

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Rows[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Rows[Row]:
        if isinstance(index, slice):
            return Rows(self._name, self._file, self._places, self._parse, self._chosen[index], self._content)
        row = self._chosen[operator.index(index)]
        begin, size, checksum = _PLACE.unpack(self._places.part(row * _PLACE.size, _PLACE.size))
        raw = self._file.part(begin, size)
        if zlib.crc32(raw) != checksum:
            raise UserError(f"{self._name}: row {row + 1} was changed while it was in use; start again")
        return self._parse(json.loads(raw))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (list, Rows)):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]

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
        stream = _opened(path)
        before = os.fstat(stream.fileno())
        held = before.st_size < IN_MEMORY_BYTES or not stat.S_ISREG(before.st_mode)  # what is piped in is read once
        file = _Held(stream.read()) if held else _File(stream)
        source = io.BytesIO(file.content) if held else stream
        key = hashlib.sha256(f"{_sha256(source)} {known}".encode()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing JSON or JSONL file") from None
    with stream:
        kept = not held and known is not None
        places = _kept(key) if kept else None
        if places is None:
            places = _Held(_validated(source, str(path), parse))
            after = os.fstat(stream.fileno())
            if not held and (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UserError(f"{path}: was changed while it was read; start again")
            places = _keep(places, key) if kept else places
    return Rows(str(path), file, places, parse, range(places.size // _PLACE.size), key if known else None)


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except ValueError as error:  # a NUL or a lone surrogate
        raise UserError(f"{str(path)!r}: not a file's name ({error}); give an existing JSON or JSONL file") from None


def _sha256(stream: BinaryIO) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(1 << 20))
    while size := stream.readinto(block):
        digest.update(block[:size])
    stream.seek(0)
    return digest.hexdigest()


def _validated(stream: BinaryIO, name: str, parse: Callable[[dict[str, Any]], Any]) -> bytes:
    """The place of each row, one after the other, when every row is good."""
    places, problems, more, before = bytearray(), [], 0, 0
    for row, (value, line, begin, raw) in enumerate(located(stream, name), 1):
        try:
            if isinstance(value, ValueError):
                raise value
            if not isinstance(value, dict):
                raise RowProblem("(row)", f"a JSON object, got {type(value).__name__}")
            parse(value)
            places += _PLACE.pack(begin, len(raw), zlib.crc32(raw))
        except ValueError as problem:
            if len(problems) < MAX_PROBLEMS:
                which = f" row {row}:" if raw and line == before else ""  # an array may stand on one line
                problems.append(f"{name}:{line}:{which} {problem}")
            else:
                more += 1
        before = line
    if more:
        problems.append(f"{name}: and {more} more bad rows; nothing was trained")
    if problems:
        raise UserError(*problems)
    if not places:
        raise UserError(f"{name}: no rows; expected a JSON array of objects or one JSON object per line")
    return bytes(places)


def _kept(key: str) -> _File | None:
    found = cache.find("rows", key)
    if found is None:
        return None
    with contextlib.suppress(OSError), (found[0] / _PLACES).open("rb") as stream:  # gone again: as if never kept
        return _File(stream)


def _keep(places: _Held, key: str) -> _File | _Held:
    """`places` in the cache; where that cannot be written, as they are: the rows are checked again next time."""
    made = None
    try:
        made = cache.partial("rows")
        (made / _PLACES).write_bytes(places.content)
        manifest.write(made, {})
        cache.publish(made, "rows", key)
    except OSError as error:
        cache.log(f"{cache.where()}: rows cannot be kept here ({error.strerror}); they are checked on every start")
    finally:
        if made:
            shutil.rmtree(made, ignore_errors=True)
    return _kept(key) or places
