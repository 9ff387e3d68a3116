"""The rows of one file, each found by its place and parsed when it is used. Needs only the standard library."""

from __future__ import annotations

import dataclasses
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.rows.bad_rows import Place
from accel_sft.rows.formats import Format

PLACE = struct.Struct("<qIIII")
"""A row's place: its first byte, number of bytes, their CRC-32, line (or row number, from 1), CRC-32 of its group."""
_PLACES_BYTES = PLACE.size << 14
"""Number of bytes of `places` that `groups` reads at once."""
_NAMED = 5
UNREAD = "not read: "
"""How the notes begin that name a key which was not read."""


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
    """Maps a remark to the number of rows it is about and the places of the first ones: each has the line (or the row's
    number), and the row's number if another row begins before it on the same line, else None."""

    MOST_NAMED = 1000

    def add(self, what: str, line: int, row: int | None) -> None:
        count_and_places = self.setdefault(what, [0, []])
        count_and_places[0] += 1
        if len(count_and_places[1]) < self.MOST_NAMED:
            count_and_places[1].append([line, row])


def named(places: Sequence[Sequence[int | None]], count: int, has_lines: bool) -> str:
    """The first places of `count` rows of one file as text, such as "lines 1, 2, 3, and 9 more"."""
    first = places[:_NAMED]
    if has_lines and not any(row for _, row in first):
        shown = f"line{'s' * (count != 1)} " + ", ".join(str(line) for line, _ in first)
    elif has_lines:  # several rows of an array may begin on one line
        shown = ", ".join(f"row {row}" if row else f"line {line}" for line, row in first)
    else:
        shown = f"row{'s' * (count != 1)} " + ", ".join(str(number) for number, _ in first)
    return shown + more(count - len(first))


def more(count: int) -> str:
    """The end of a list of which `count` items are not shown."""
    return f", and {count:,} more" if count else ""


@dataclasses.dataclass
class RowFile:
    """The rows of one file, each parsed when it is used.

    Attributes:
        content: a hash of the rows and their parser; None if the parser has no `code_fingerprint`.
        sha256: SHA-256 of the file alone; for a data set of the hub, its fingerprint.
        text: the bytes that hold the rows as JSON.
        complete: False if an audit left bad rows out.
        left_out: rows that the parser left out, by reason.
        noted: rows that the parser kept with a note, by note.
    """

    name: str
    format: Format
    content: str | None
    sha256: str
    text: OpenFile | bytes
    places: OpenFile | bytes
    left_out: Tally
    noted: Tally
    complete: bool = True

    def __len__(self) -> int:
        return len(self.places) // PLACE.size

    def row(self, number: int) -> dict[str, Any]:
        """Return the row with this index (from 0), as the parser takes it."""
        begin, size, checksum, _, _ = self._place(number)
        raw = self.text[begin : begin + size]
        if zlib.crc32(raw) != checksum:
            raise UserError(f"{self.name}: row {number + 1} was changed while it was in use; start again")
        row: dict[str, Any] = json.loads(raw)
        return row

    def groups(self) -> Iterator[int]:
        """Yield a number for each row, in order: rows that the parser put into one group have the same number."""
        for at in range(0, len(self.places), _PLACES_BYTES):
            for *_, group in PLACE.iter_unpack(self.places[at : min(at + _PLACES_BYTES, len(self.places))]):
                yield group

    def place(self, number: int) -> Place:
        """Where a row stands."""
        line = self._place(number)[3]
        if not self.format.has_lines:
            return Place(self.name, None, line)
        alone = not number or self._place(number - 1)[3] != line
        counted = self.complete and not self.left_out  # else the row's number in the file is not known
        return Place(self.name, line, None if alone or not counted else number + 1)

    def place_at(self, line: int, row: int | None) -> Place:
        """The place of a row that a tally names."""
        return Place(self.name, line, row) if self.format.has_lines else Place(self.name, None, line)

    def _place(self, number: int) -> tuple[int, int, int, int, int]:
        return PLACE.unpack(self.places[number * PLACE.size : (number + 1) * PLACE.size])
