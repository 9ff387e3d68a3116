"""Records which rows cannot be used, where they stand and why, and lets an audit read the file's other rows."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple


class Place(NamedTuple):
    """Where a row stands: its file and line (from 1); and its number (from 1) if several rows begin on that line.

    `line` is None in files without lines, such as Parquet files.
    """

    file: str
    line: int | None
    row: int | None = None

    def __str__(self) -> str:
        return self.file + (f":{self.line}" if self.line else "") + (f" row {self.row}" if self.row else "")


class BadRow(NamedTuple):
    """A row that cannot be used, and why; `syntax` is False if its content is at fault, not the file's syntax."""

    place: Place
    reason: str
    syntax: bool


_left_out: contextvars.ContextVar[list[BadRow] | None] = contextvars.ContextVar("left_out", default=None)


@contextlib.contextmanager
def bad_rows_left_out(most: int) -> Iterator[list[BadRow]]:
    """Inside, `read_rows` leaves bad rows out instead of refusing their file, so that an audit sees the other rows.

    The yielded list receives at most `most` of the bad rows. A file with bad rows is not kept in the cache.
    """
    found: list[BadRow] = _Limited(most)
    token = _left_out.set(found)
    try:
        yield found
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
