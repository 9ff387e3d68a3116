"""Reads files by their suffix (JSON, CSV, Parquet and text, compressed or not), and yields their values with places.

Each data format has a reader in READERS, each compression an opener in COMPRESSIONS. pyarrow is imported only for files
that need it; for the others the standard library is enough.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.rows.json_stream import MAX_ROW_BYTES, Located, located

Reader = Callable[[BinaryIO, str], Iterator[Located]]
"""Takes a seekable stream and the file's name in messages, and yields the values as `located` does."""
_BATCH_ROWS = 256
_MOST_DECOMPRESSED, _MOST_TIMES = 256 << 20, 200
"""A compressed file may hold this many bytes or, if that is more, this many times its size (text: 3 to 10 times)."""
_FIELDS_SHOWN = 80


class Format(NamedTuple):
    """How a file is read.

    Attributes:
        suffix: the suffix without the compression, ".jsonl" for rows.jsonl.gz; "" if READERS lacks it, and the file
            is read as JSON.
        compression: the suffix of the compression, or "".
    """

    suffix: str
    compression: str

    @property
    def is_text_of_rows(self) -> bool:
        """Whether the file, once decompressed, holds the rows as JSON, so that they need no conversion."""
        return READERS.get(self.suffix, located) is located

    @property
    def has_lines(self) -> bool:
        """Whether a row is named by its line, and not by its number."""
        return self.suffix != ".parquet"


def format_of(path: Path) -> Format:
    """Return the format that a file's name stands for."""
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    compression = last if last in COMPRESSIONS else ""
    suffix = before if compression else last
    return Format(suffix if suffix in READERS else "", compression)


def is_data_file(path: Path) -> bool:
    """Whether a file in a folder counts as a data file: its suffix is in READERS, and it is no text."""
    return format_of(path).suffix not in ("", *TEXTS)


def decompress(stream: BinaryIO, format: Format, name: str, target: BinaryIO) -> None:
    """Write the decompressed content of a file to `target`.

    Raises:
        UserError: the file is damaged, truncated or too large inside, or this Python cannot decompress it.
        OSError: `target` cannot be written.
    """
    stream.seek(0)
    try:
        most = max(_MOST_DECOMPRESSED, _MOST_TIMES * stream.seek(0, os.SEEK_END))
        stream.seek(0)
        with COMPRESSIONS[format.compression](stream) as opened:
            while piece := opened.read(1 << 20):
                target.write(piece)
                if target.tell() > most:
                    raise UserError(
                        f"{name}: holds more than {_MOST_TIMES} times its size, which no rows do; decompress it to look"
                    )
    except ImportError as error:  # a Python that was built without the compression's library
        raise UserError(f"{name}: this Python cannot read {format.compression} ({error}); decompress it") from None
    except _damaged() as error:
        if isinstance(error, OSError) and error.errno:  # the target's error; a damaged file's error has no number
            raise
        raise UserError(f"{name}: cannot be decompressed ({error}); is it whole, and {format.compression}?") from None


def _gzip(stream: BinaryIO) -> Any:
    import gzip

    return gzip.GzipFile(fileobj=stream)


def _bzip2(stream: BinaryIO) -> Any:
    import bz2

    return bz2.BZ2File(stream)


def _xz(stream: BinaryIO) -> Any:
    import lzma

    return lzma.LZMAFile(stream)


def _zstandard(stream: BinaryIO) -> Any:
    import pyarrow

    return pyarrow.CompressedInputStream(pyarrow.PythonFile(stream, "r"), "zstd")


COMPRESSIONS: dict[str, Callable[[BinaryIO], Any]] = {".gz": _gzip, ".bz2": _bzip2, ".xz": _xz, ".zst": _zstandard}


def _damaged() -> tuple[type[Exception], ...]:
    """The exceptions that reading a damaged file raises."""
    lzma = sys.modules.get("lzma")
    return EOFError, ValueError, zlib.error, OSError, *([lzma.LZMAError] if lzma else [])


def _comma_separated(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Yield the rows below the header, with each cell as text."""
    return _delimited(stream, name, ",")


def _tab_separated(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Like `_comma_separated`, for a file with tabs."""
    return _delimited(stream, name, "\t")


def _delimited(stream: BinaryIO, name: str, delimiter: str) -> Iterator[Located]:
    stream.seek(0)
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))  # a cell may hold a chat; the default is 128 KiB
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    records = csv.reader(text, delimiter=delimiter, strict=True)
    header, line = None, 0
    try:
        for record in records:
            begin, line = line + 1, records.line_num
            if not record:  # an empty line
                continue
            if header is None:
                header = record
                if problem := _header_problem(header):
                    yield Located(ValueError(problem), begin, 0, b"")
                    return
            elif len(record) != len(header):
                shown = ", ".join(header)[:_FIELDS_SHOWN]
                problem = f"{len(record)} fields, where the header has {len(header)} ({shown})"
                yield Located(ValueError(problem), begin, 0, b"")
            else:
                row = dict(zip(header, record, strict=True))
                yield Located(row, begin, 0, json.dumps(row).encode())
    except csv.Error as error:
        yield Located(ValueError(f"not CSV ({error}); the rest is unread"), line + 1, 0, b"")
    except UnicodeDecodeError:
        raise UserError(f"{name}:{line + 1}: not UTF-8, here or in the lines after; save the file as UTF-8") from None
    finally:
        text.detach()  # otherwise `text` would close the caller's stream


def _header_problem(header: list[str]) -> str:
    if not all(column.strip() for column in header):
        return "the header has a column without a name; the first line names the columns"
    return f"the header has {doubled}" if (doubled := _doubled(header)) else ""


def _doubled(columns: list[str]) -> str:
    """Return what is wrong if two columns have the same name; "" if all names differ."""
    for column in columns:
        if columns.count(column) > 1:
            return f"the column {column[:_FIELDS_SHOWN]!r} twice; give each a name of its own"
    return ""


def _parquet(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The rows of a Parquet file, each with its number (from 1) in place of a line."""
    import pyarrow
    from pyarrow import parquet

    stream.seek(0)
    number = 0
    try:
        opened = parquet.ParquetFile(stream)
        if problem := _doubled(opened.schema_arrow.names):
            raise UserError(f"{name}: it has {problem}")
        for batch in opened.iter_batches(_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield row_as_json(row, number)
    except (pyarrow.ArrowException, OSError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{name}: cannot be read as Parquet behind row {number} ({cause}); is it whole?") from None


def row_as_json(row: dict[str, Any], number: int) -> Located:
    """Return a row of Python values as it would be read from JSON, with `number` in place of a line."""
    raw = json.dumps(row, default=_as_json).encode()
    return Located(json.loads(raw), number, 0, raw)


def _as_json(value: Any) -> Any:
    """Replace a value that JSON cannot hold. Bytes become an object, so that no parser takes them for text."""
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return {"bytes": len(value)} if isinstance(value, bytes) else {"unknown": type(value).__name__}


def _document(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Yield a text file as one row, {"text": ...}; one with rows of JSON in it is read as those.

    Raises:
        UserError: the file is no UTF-8, or larger than a row may be.
    """
    stream.seek(0)
    content = stream.read(MAX_ROW_BYTES + 1)
    if _ROWS_OF_JSON.match(content):
        yield from located(stream, name)
        return
    if len(content) > MAX_ROW_BYTES:
        raise UserError(f"{name}: more than {MAX_ROW_BYTES >> 20} MiB in one text; divide it into several files")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(f"{name}:{line}: not UTF-8; save the file as UTF-8") from None
    yield row_as_json({"text": text}, 1)


_ROWS_OF_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"')
TEXTS = (".txt", ".md")
"""Suffixes of texts. In a folder they may be about the data."""
READERS: dict[str, Reader] = {
    ".json": located,
    ".jsonl": located,
    ".ndjson": located,
    ".csv": _comma_separated,
    ".tsv": _tab_separated,
    ".parquet": _parquet,
    ".txt": _document,
    ".md": _document,
}
