"""Reads one file of rows: each row is checked at the first reading, and its place is kept in the cache.

JSON rows stay in their file; rows of other formats are written to the cache as JSON Lines. Needs only
the standard library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import stat
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from accel_sft.api.errors import UserError
from accel_sft.io import cache
from accel_sft.rows import hub
from accel_sft.rows.bad_rows import BadRow, Place, left_out_rows
from accel_sft.rows.fingerprint import code_fingerprint
from accel_sft.rows.formats import BATCH_ROWS, READERS, Format, arrow_rows, decompress, format_of
from accel_sft.rows.json_stream import Located, ParsedRow, RowLeftOut, RowProblem, located
from accel_sft.rows.row_file import PLACE, UNREAD, OpenFile, RowFile, Tally, named

MAX_PROBLEMS = 20
MAX_PIPED_BYTES = 1 << 30
"""Maximum number of bytes read from a pipe: they are held in memory, and a pipe may have no end."""
IN_MEMORY_BYTES = 1 << 20
"""JSON files of fewer bytes are held in memory and checked at every start, which takes no longer than finding them in
the cache."""
_ANNOUNCED_BYTES = 64 << 20
"""Files of at least this many bytes are announced by a line when their rows are converted."""
_KIND, _PLACES, _TEXT = "rows", "places.bin", "rows.jsonl"
_FORM = 5
"""Version of a cache entry's form; it changes when older entries can no longer be read."""
_EXPECTED = "a JSON, JSONL, CSV, Parquet or text file"
_NO_ROWS = "a JSON array of objects or one JSON object per line"

Parse = Callable[[dict[str, Any]], Any]
About = tuple[str, Format, str | None, str]
"""Name, format, content and SHA-256: the first fields of a RowFile."""


def read_file(path: Path, parse: Parse) -> RowFile:
    """Open a file, and check its rows unless the cache shows that they were checked before.

    Raises:
        UserError: as `read_rows`.
    """
    name, known = str(path), code_fingerprint(parse)
    try:
        stream = path.open("rb")
        before = os.fstat(stream.fileno())
        regular = stat.S_ISREG(before.st_mode)
        if not regular and not stat.S_ISFIFO(before.st_mode):
            raise UserError(f"{name}: a device, not a file; give {_EXPECTED}")
        if (begin := stream.peek(16)).startswith(b"version https://git-lfs"):
            raise UserError(f"{name}: a pointer of Git LFS, not the file itself; fetch it: git lfs pull")
        format = format_of(path, begin)
        converted = bool(format.compression) or not format.is_text_of_rows
        held = not regular or (before.st_size < IN_MEMORY_BYTES and not converted)  # a pipe can be read only once
        content = stream.read(-1 if regular else MAX_PIPED_BYTES + 1) if held else OpenFile(os.dup(stream.fileno()))
        if not regular and len(content) > MAX_PIPED_BYTES:
            raise UserError(f"{name}: more than {MAX_PIPED_BYTES >> 20} MiB come through a pipe; give a file instead")
        source = io.BytesIO(content) if isinstance(content, bytes) else stream
        sha256 = hashlib.file_digest(source, "sha256").hexdigest()
        key = _key(sha256, known, format if converted else "")
    except OSError as error:
        raise UserError(f"{name}: {unreadable(error)}") from None
    except ValueError as error:  # the name has a NUL or a lone surrogate
        raise UserError(f"{name!r}: not a file's name ({error}); give {_EXPECTED}") from None
    with contextlib.ExitStack() as stack:
        stack.enter_context(stream)
        about = name, format, known and key, sha256
        keep = known is not None and (converted or not held)
        if keep and (found := _kept(about, key, None if converted else content)):
            return found
        folder, keep = _workspace(stack, keep, converted)
        if converted and before.st_size >= _ANNOUNCED_BYTES:
            cache.log(f"{name}: reading {before.st_size >> 20:,} MiB" + (", once; its rows are kept" if keep else ""))
        try:
            text, checked = _checked(source, about, parse, folder if converted else None)
        except OSError as error:  # only converted rows are written here
            raise UserError(f"{name}: cannot be converted in {folder} ({error.strerror}); free space there") from None
        after = content.stat if isinstance(content, OpenFile) else before
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise UserError(f"{name}: was changed while it was read; start again")
        return _made(folder, key if keep else None, about, content if text is None else text, checked)


def unreadable(error: OSError) -> str:
    """What is wrong with a file that cannot be opened, and what to do."""
    return f"cannot be read ({error.strerror}); give an existing one: {_EXPECTED}"


def read_dataset(path: Path, parse: Parse, use: str, lines: list[str]) -> RowFile:
    """Like `read_file`, for a data set of the hub, read for `use` ("train" or "validation"); what `hub.load` notes is
    added to `lines`.

    Raises:
        UserError: as `hub.load`; or there are bad rows, which are named by number.
    """
    name, known = str(path), code_fingerprint(parse)
    dataset, more = hub.load(name, use)
    lines += more
    key = _key(dataset._fingerprint, known)
    format = Format(".parquet", "")  # rows are named by number, as in Parquet files
    about = name, format, known and key, dataset._fingerprint
    if known and (found := _kept(about, key, None)):
        return found
    with contextlib.ExitStack() as stack:
        folder, keep = _workspace(stack, known is not None, True)
        try:
            with (folder / _TEXT).open("wb") as text:
                rows = arrow_rows(dataset.with_format("arrow").iter(BATCH_ROWS), name)
                checked = _validated(rows, name, format, parse, text)
        except OSError as error:
            raise UserError(f"{name}: cannot be written in {folder} ({error.strerror}); free space there") from None
        return _made(folder, key if keep else None, about, OpenFile(os.open(folder / _TEXT, os.O_RDONLY)), checked)


def _key(*decides: Any) -> str:
    """The key of a cache entry: a hash of everything that decides what the entry holds."""
    return hashlib.sha256(" ".join(map(str, (*decides, _FORM))).encode()).hexdigest()


def _workspace(stack: contextlib.ExitStack, keep: bool, converted: bool) -> tuple[Path, bool]:
    """Return a folder that lasts until the stack closes, if one is needed, and whether it may become a cache entry."""
    if keep:
        try:
            return stack.enter_context(cache.partial(_KIND)), True
        except OSError as error:
            _log_unkept(error)
    if not converted:
        return Path(), False
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="accel_sft-"))), False


@dataclasses.dataclass
class _Checked:
    places: bytearray = dataclasses.field(default_factory=bytearray)
    left_out: Tally = dataclasses.field(default_factory=Tally)
    noted: Tally = dataclasses.field(default_factory=Tally)
    bad: int = 0


def _checked(source: BinaryIO, about: About, parse: Parse, folder: Path | None) -> tuple[OpenFile | None, _Checked]:
    """Check the rows, after converting them into `folder` if it is given; return the converted text (or None) too."""
    name, format, *_ = about
    if folder is None:
        return None, _validated(located(source, name), name, format, parse)
    with contextlib.ExitStack() as stack:
        if format.compression:
            plain = stack.enter_context((folder / _TEXT).open("w+b"))
            decompress(source, format, name, plain)
            source = plain
        if format.is_text_of_rows:
            checked = _validated(located(source, name), name, format, parse)
        else:
            if format.compression:
                (folder / _TEXT).unlink()
            lines = stack.enter_context((folder / _TEXT).open("wb"))
            checked = _validated(READERS[format.suffix](source, name), name, format, parse, lines)
    return OpenFile(os.open(folder / _TEXT, os.O_RDONLY)), checked


def _validated(
    values: Iterable[Located], name: str, format: Format, parse: Parse, lines: BinaryIO | None = None
) -> _Checked:
    """Parse each row and record its place: in the source, or in `lines` if the rows are written there."""
    found, problems = _Checked(), Tally()
    left_out = left_out_rows()
    before = 0
    for number, (value, line, begin, raw) in enumerate(values, 1):
        row = number if raw and line == before else None  # several rows of an array may begin on one line
        try:
            if isinstance(value, ValueError):
                raise value
            if not isinstance(value, dict):
                raise RowProblem(None, f"a JSON object, got {type(value).__name__}")
            parsed = parse(value)
            if not isinstance(parsed, ParsedRow):
                parsed = ParsedRow(parsed)
            for note in (*parsed.notes, *(UNREAD + key for key in parsed.unread)):
                found.noted.add(note, line, row)
            if lines is not None:
                begin = lines.tell()
                lines.write(raw + b"\n")
            group = zlib.crc32(parsed.group.encode() or _content(raw))
            found.places += PLACE.pack(begin, len(raw), zlib.crc32(raw), line, group)
        except RowLeftOut as reason:
            found.left_out.add(str(reason), line, row)
        except ValueError as problem:
            found.bad += 1
            if left_out is not None:
                place = Place(name, line, row) if format.has_lines else Place(name, None, line)
                left_out.append(BadRow(place, str(problem), isinstance(value, ValueError)))
            elif str(problem) in problems or len(problems) < MAX_PROBLEMS:
                problems.add(str(problem), line, row)
        before = line
    if problems:
        raise UserError(*_told(problems, name, format, found.bad))
    if not found.places and not found.left_out and not found.bad:
        raise UserError(f"{name}: no rows; expected {_NO_ROWS if format.is_text_of_rows else 'a header and rows'}")
    return found


def _content(raw: bytes) -> bytes:
    """A row's text without what does not make it another row: blanks, line breaks and the order of its keys."""
    return json.dumps(json.loads(raw), sort_keys=True).encode()


def _told(problems: Tally, name: str, format: Format, bad: int) -> Iterator[str]:
    """Yield a line for each problem, with the first row that has it and the other rows that have it too."""
    for problem, (count, ((line, row), *others)) in problems.items():
        where = f"{name}:{line}:" if format.has_lines else f"{name}: row {line}:"
        told = f"{where} row {row}: {problem}" if row else f"{where} {problem}"
        also = f"; {named(others, count - 1, format.has_lines)} {'has' if count == 2 else 'have'} the same problem"
        yield told + (also if others else "")
    if unsaid := bad - sum(count for count, _ in problems.values()):
        yield f"{name}: and {unsaid} more bad rows; nothing was trained"


def _kept(about: About, key: str, text: OpenFile | bytes | None) -> RowFile | None:
    """Return the rows of a cache entry, or None if it is not there. `text` holds the rows; None: the entry does."""
    if found := cache.find(_KIND, key):
        folder, tallies = found
        with contextlib.suppress(OSError):  # the entry may have been removed meanwhile
            places = OpenFile(os.open(folder / _PLACES, os.O_RDONLY))
            text = text if text is not None else OpenFile(os.open(folder / _TEXT, os.O_RDONLY))
            return RowFile(*about, text, places, Tally(tallies["left_out"]), Tally(tallies["noted"]))
    return None


def _made(folder: Path, key: str | None, about: About, text: OpenFile | bytes, checked: _Checked) -> RowFile:
    """Return the file's rows. With a key, their places (and their text, if `folder` has it) go to the cache. If the
    cache cannot be written, the places stay in memory, and the next start checks all rows again."""
    places = bytes(checked.places)
    made = RowFile(*about, text, places, checked.left_out, checked.noted, not checked.bad)
    if key is None or checked.bad:
        return made
    try:
        (folder / _PLACES).write_bytes(places)
        cache.publish(folder, _KIND, key, {"left_out": made.left_out, "noted": made.noted})
    except OSError as error:
        _log_unkept(error)
        return made
    return _kept(about, key, text) or made


def _log_unkept(error: OSError) -> None:
    cache.log(f"{cache.folder()}: rows cannot be kept here ({error.strerror}); they are checked on every start")
