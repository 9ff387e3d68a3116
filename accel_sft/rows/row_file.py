"""The rows of one file, parsed when they are used; where each row stands; which rows cannot be used, and why."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.rows.json_stream import Written

PLACE = struct.Struct("<qIIII")
"""A row's place: first byte, number of bytes, CRC-32 of the bytes, line or number (from 1), CRC-32 of the group."""
_PLACES_BYTES = PLACE.size << 14
"""Number of bytes of `places` that `groups` reads at once."""
_NAMED = 5
UNREAD = "not read: "
"""Beginning of each note on a key that the parser did not read."""


class Place(NamedTuple):
    """Where a row stands: its file and line (from 1) or, in a JSON array or another file without lines, its number."""

    file: str
    line: int | None
    row: int | None = None

    def __str__(self) -> str:
        return self.file + (f":{self.line}" if self.line else "") + (f" row {self.row}" if self.row else "")


class BadRow(NamedTuple):
    """A row that cannot be used, and why; `syntax`: whether the file's syntax is wrong, not the row's content."""

    place: Place
    reason: str
    syntax: bool


_left_out: contextvars.ContextVar[list[BadRow] | None] = contextvars.ContextVar("left_out", default=None)


@contextlib.contextmanager
def bad_rows_left_out(most: int) -> Iterator[list[BadRow]]:
    """In this context, `read_rows` leaves bad rows out instead of refusing the file, so that an audit sees the others.

    The yielded list receives at most `most` of the bad rows. A file with bad rows is not kept in the cache.
    """
    bad_rows: list[BadRow] = _Limited(most)
    token = _left_out.set(bad_rows)
    try:
        yield bad_rows
    finally:
        _left_out.reset(token)


def left_out_rows() -> list[BadRow] | None:
    """The list to which bad rows are to be added; None if their file is to be refused."""
    return _left_out.get()


class _Limited(list[BadRow]):
    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def append(self, bad: BadRow) -> None:
        if len(self) < self._most and bad not in self:  # a task may read a file twice
            super().append(bad)


class OpenFile:
    """An open file that can be sliced like `bytes`, and is closed with the last reference to it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def stat(self) -> os.stat_result:
        """The file's status as it is now."""
        return os.fstat(self._descriptor)

    def __len__(self) -> int:
        return self.stat.st_size

    def __getitem__(self, part: slice) -> bytes:
        return os.pread(self._descriptor, part.stop - part.start, part.start)

    def __del__(self) -> None:
        os.close(self._descriptor)


class Tally(dict[str, list[Any]]):
    """Maps a remark to how many rows it applies to, and to the line numbers (or row numbers) of the first of them."""

    MOST_NAMED = 1000

    def add(self, what: str, number: int) -> None:
        count_and_numbers = self.setdefault(what, [0, []])
        count_and_numbers[0] += 1
        if len(count_and_numbers[1]) < self.MOST_NAMED:
            count_and_numbers[1].append(number)


def named(numbers: Sequence[int], count: int, has_lines: bool) -> str:
    """The first places of `count` rows of one file as text, such as "lines 1, 2, 3, and 9 more"."""
    first = numbers[:_NAMED]
    what = "line" if has_lines else "row"
    return f"{what}{'s' * (count != 1)} {', '.join(map(str, first))}{more(count - len(first))}"


def more(count: int) -> str:
    """The end of a list of which `count` items are not shown; "" for 0."""
    return f", and {count:,} more" if count else ""


@dataclasses.dataclass
class RowFile:
    """The rows of one file, each parsed when it is used.

    Attributes:
        content: a hash of the rows and their parser; None if the parser has no `code_fingerprint`.
        sha256: SHA-256 of the file alone; for a data set of the hub, the data set's fingerprint.
        has_lines: whether a row is named by its line, and not by its number.
        text: the bytes that hold the rows as JSON.
        left_out: rows that the parser left out, by reason.
        noted: rows that the parser kept with a note, by note.
    """

    name: str
    content: str | None
    sha256: str
    has_lines: bool = True
    text: OpenFile | bytes | None = None
    places: OpenFile | bytes | bytearray = b""
    left_out: Tally = dataclasses.field(default_factory=Tally)
    noted: Tally = dataclasses.field(default_factory=Tally)

    def __len__(self) -> int:
        return len(self.places) // PLACE.size

    def row(self, number: int) -> dict[str, Any]:
        """Return the row with this index (from 0), in the form that the parser takes."""
        begin, size, checksum, line, _ = self._place(number)
        assert self.text is not None
        raw = self.text[begin : begin + size]
        if zlib.crc32(raw) != checksum:
            raise UserError(f"{self.place_at(line)}: was changed while it was in use; start again")
        row: dict[str, Any] = json.loads(raw, parse_float=Written)
        return row

    def groups(self) -> Iterator[int]:
        """Yield a number for each row, in order: rows that the parser put into one group have the same number."""
        for at in range(0, len(self.places), _PLACES_BYTES):
            for *_, group in PLACE.iter_unpack(self.places[at : min(at + _PLACES_BYTES, len(self.places))]):
                yield group

    def place(self, number: int) -> Place:
        """Where the row with this index stands."""
        return self.place_at(self._place(number)[3])

    def place_at(self, number: int) -> Place:
        """The place of a row with this line or number."""
        return Place(self.name, number) if self.has_lines else Place(self.name, None, number)

    def _place(self, number: int) -> tuple[int, int, int, int, int]:
        return PLACE.unpack(self.places[number * PLACE.size : (number + 1) * PLACE.size])
