"""Reads one file of rows: each row is checked at the first reading, and its place is kept in the cache.

Small JSON files are held in memory, large JSON Lines files stay where they are, and all other files are converted to
JSON Lines in the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import os
import re
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from accel_sft.api.errors import UserError
from accel_sft.io import cache
from accel_sft.rows.fingerprint import code_fingerprint
from accel_sft.rows.formats import BATCH_ROWS, READERS, Format, arrow_rows, decompress, format_of, has_lines
from accel_sft.rows.json_stream import Located, ParsedRow, RowLeftOut, RowProblem, located
from accel_sft.rows.row_file import PLACE, UNREAD, BadRow, OpenFile, RowFile, Tally, left_out_rows, more, named
from accel_sft.rows.sources import EXPECTED, load_dataset, unreadable

MAX_PROBLEMS = 20
IN_MEMORY_BYTES = 1 << 20
"""JSON files smaller than this are held in memory and checked at every start: that takes no longer than finding them
in the cache."""
_ANNOUNCED_BYTES = 64 << 20
"""Files of at least this many bytes are announced by a line when their rows are checked."""
_KIND, _PLACES, _TEXT, _PLAIN = "rows", "places.bin", "rows.jsonl", "decompressed"
_FORM = 8
"""Version of a cache entry's form; it changes when older entries can no longer be read."""
_KEYS_SHOWN = 6
_ROWS = "a JSON array of objects, one JSON object per line, or a header and rows"
_ROW_OF_TABLE = 'a row, got columns, as from df.to_json(); write rows: df.to_json(FILE, orient="records", lines=True)'

Parse = Callable[[dict[str, Any]], Any]
Read = Callable[[Path, contextlib.ExitStack], Iterable[Located]]
"""Reads the rows of a file; the folder is for temporary files. Rows and folder last until the stack closes."""


def read_file(path: Path, parse: Parse) -> RowFile:
    """Open a file, and check its rows unless the cache shows that they were checked before."""
    with _opened(path) as stream:
        format, before = format_of(path, stream.peek(16)), os.fstat(stream.fileno())
        sha256, plain = hashlib.file_digest(stream, "sha256").hexdigest(), format.is_json and not format.compression
        rows = RowFile(str(path), _key(sha256, parse, format), sha256)
        if plain:
            rows.has_lines = has_lines(format.suffix, stream)

        def check_unchanged() -> None:
            after = os.fstat(stream.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise UserError(f"{path}: was changed while it was read; start again")

        def values(folder: Path, stack: contextlib.ExitStack) -> Iterable[Located]:
            if before.st_size >= _ANNOUNCED_BYTES:
                cache.log(f"{path}: reading {before.st_size >> 20:,} MiB, once")
            source: Any = stream
            if format.compression:
                source = stack.enter_context((folder / _PLAIN).open("w+b"))
                decompress(path, format.compression, source)
            rows.has_lines = has_lines(format.suffix, source)
            return READERS.get(format.suffix, located)(source, rows.name)

        if plain and before.st_size < IN_MEMORY_BYTES:
            written = io.BytesIO()
            _check(rows, located(stream, rows.name), parse, written)
            check_unchanged()
            rows.text = written.getvalue()
            return rows
        if plain and rows.has_lines:
            rows.text = OpenFile(os.dup(stream.fileno()))
        return _through_cache(rows, parse, values, check_unchanged)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a regular file for reading."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        raise UserError(f"{path}: {unreadable(error)}") from None
    except ValueError as error:  # the name has a NUL or a lone surrogate
        raise UserError(f"{str(path)!r}: not a file's name ({error}); give {EXPECTED}") from None
    if not regular:
        raise UserError(f"{path}: is a pipe or a device, not a file; give {EXPECTED}")
    try:
        with path.open("rb") as stream:
            if stream.peek(16).startswith(b"version https://git-lfs"):
                raise UserError(f"{path}: is a pointer of Git LFS, not the file itself; fetch the file: git lfs pull")
            yield stream
    except OSError as error:
        raise UserError(f"{path}: {unreadable(error)}") from None


def read_dataset(path: Path, parse: Parse, use: str, lines: list[str]) -> RowFile:
    """Like `read_file`, for a data set of the hub; the notes of `load_dataset` are added to `lines`."""
    dataset, notes = load_dataset(str(path), use)
    lines += notes
    sha256 = dataset._fingerprint
    rows = RowFile(str(path), _key(sha256, parse, Format(".parquet", "")), sha256, has_lines=False)
    tables = dataset.with_format("arrow").iter(BATCH_ROWS)
    return _through_cache(rows, parse, lambda *_: arrow_rows(tables, rows.name), lambda: None)


def _key(sha256: str, parse: Parse, format: Format) -> str | None:
    """The key of a cache entry, a hash of all that decides its content; None if the parser has no fingerprint."""
    code = code_fingerprint(parse)
    return code and hashlib.sha256(f"{sha256} {code} {format} {_FORM}".encode()).hexdigest()


def _through_cache(rows: RowFile, parse: Parse, read: Read, check_unchanged: Callable[[], None]) -> RowFile:
    """Take the rows from the cache. If it lacks them, check them and store their places and, unless `rows.text` is set,
    their text. If the cache cannot be written, places stay in memory, and the next start checks again."""
    if _is_kept(rows):
        return rows
    with contextlib.ExitStack() as stack:
        folder, keep = _workspace(stack, rows.content is not None)
        try:
            values = read(folder, stack)
            written = None if rows.text else stack.enter_context((folder / _TEXT).open("wb"))
            bad = _check(rows, values, parse, written)
            if written:
                written.close()
                rows.text = OpenFile(os.open(folder / _TEXT, os.O_RDONLY))
        except OSError as error:
            raise UserError(f"{rows.name}: cannot be converted in {folder} ({error.strerror}); free space") from None
        check_unchanged()
        if keep and rows.content and not bad:
            try:
                (folder / _PLAIN).unlink(missing_ok=True)
                (folder / _PLACES).write_bytes(rows.places[:])
                about = {"left_out": rows.left_out, "noted": rows.noted, "has_lines": rows.has_lines}
                cache.publish(folder, _KIND, rows.content, about)
            except OSError as error:
                _log_unkept(error)
            else:
                _is_kept(rows)
    return rows


def _is_kept(rows: RowFile) -> bool:
    """Take the rows from the cache; return whether they are there."""
    if rows.content and (entry := cache.find(_KIND, rows.content)):
        folder, about = entry
        with contextlib.suppress(OSError):  # the entry may have been removed meanwhile
            rows.text = rows.text or OpenFile(os.open(folder / _TEXT, os.O_RDONLY))
            rows.places = OpenFile(os.open(folder / _PLACES, os.O_RDONLY))
            rows.left_out, rows.noted = Tally(about["left_out"]), Tally(about["noted"])
            rows.has_lines = about["has_lines"]
            return True
    return False


def _workspace(stack: contextlib.ExitStack, keep: bool) -> tuple[Path, bool]:
    """Return a folder that lasts until the stack closes, and whether it may become a cache entry."""
    if keep:
        try:
            return stack.enter_context(cache.partial(_KIND)), True
        except OSError as error:
            _log_unkept(error)
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_sft-"))), False


def _log_unkept(error: OSError) -> None:
    cache.log(f"{cache.folder()}: rows cannot be kept here ({error.strerror}); they are checked on every start")


def _check(rows: RowFile, values: Iterable[Located], parse: Parse, written: BinaryIO | None) -> int:
    """Parse each row and record its place in the file or, if `written` is given, in `written`, which then receives the
    rows. Return how many bad rows an audit left out; outside an audit, these raise UserError."""
    places, problems, bad = bytearray(), Tally(), 0
    left_out = left_out_rows()
    for value, number, raw, begin in values:
        try:
            if isinstance(value, ValueError):
                raise value
            if not isinstance(value, dict):
                raise RowProblem(None, f"a JSON object, got {type(value).__name__}")
            if _is_table(value):
                raise RowProblem(None, _ROW_OF_TABLE)
            parsed = parse(value)
            if not isinstance(parsed, ParsedRow):
                parsed = ParsedRow(parsed)
            for note in (*parsed.notes, *(UNREAD + key for key in parsed.unread)):
                rows.noted.add(note, number)
            if written is not None:
                begin = written.tell()
                written.write(raw + b"\n")
            group = zlib.crc32(parsed.group.encode() or _content(raw))
            places += PLACE.pack(begin, len(raw), zlib.crc32(raw), number, group)
        except RowLeftOut as reason:
            rows.left_out.add(str(reason), number)
        except ValueError as problem:
            bad, line = bad + 1, f"{problem}{_keys_beside(problem, value)}"
            if left_out is not None:
                left_out.append(BadRow(rows.place_at(number), line, isinstance(value, ValueError)))
            elif line in problems or len(problems) < MAX_PROBLEMS:
                problems.add(line, number)
    if problems:
        raise UserError(*_described(problems, rows, bad))
    if not places and not rows.left_out and not bad:
        raise UserError(f"{rows.name}: has no rows; expected {_ROWS}")
    rows.places = places
    return bad


def _keys_beside(problem: ValueError, row: Any) -> str:
    """Name the row's keys if it lacks the key that the problem is about; else ""."""
    field = problem.field if isinstance(problem, RowProblem) else None
    if not field or not isinstance(row, dict) or not row or field in row or re.split(r"[.\[]", field)[0] in row:
        return ""
    names = ", ".join(f"{key:.30}" for key in itertools.islice(row, _KEYS_SHOWN))
    return f"; the row has {names}{more(max(len(row) - _KEYS_SHOWN, 0))}"


def _is_table(row: dict[str, Any]) -> bool:
    """Whether an object is a table by columns, as pandas writes it: its columns are objects with the same row
    numbers."""
    rows = next(iter(row.values()), None)
    if not rows or not isinstance(rows, dict) or not all(map(str.isdecimal, rows)):
        return False
    return all(isinstance(column, dict) and column.keys() == rows.keys() for column in row.values())


def _described(problems: Tally, rows: RowFile, bad: int) -> Iterator[str]:
    """Yield a line for each problem, with the first row that has it and the other rows that have it too."""
    for problem, (count, (first, *others)) in problems.items():
        also = f"; {named(others, count - 1, rows.has_lines)} {'has' if count == 2 else 'have'} the same problem"
        yield f"{rows.place_at(first)}: {problem}" + (also if others else "")
    if remaining := bad - sum(count for count, _ in problems.values()):
        yield f"{rows.name}: and {remaining} more bad rows; nothing was trained"


def _content(raw: bytes) -> bytes:
    """A row's text in a normal form, equal for rows that differ only in blanks, line breaks or the order of keys."""
    return json.dumps(json.loads(raw), sort_keys=True).encode()
