"""Reads files by their suffix (JSON, CSV, Parquet and text, compressed or not), and yields rows with their places.

READERS has a reader for each data format, COMPRESSIONS the first bytes of each compression. pyarrow is imported only
for files that need it.
"""

from __future__ import annotations

import base64
import codecs
import contextlib
import csv
import datetime
import decimal
import functools
import importlib
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.rows.json_stream import MAX_ROW_BYTES, Located, decoded, is_array, located, not_utf8

Reader = Callable[[BinaryIO, str], Iterator[Located]]
"""Takes a seekable stream and the file's name for messages, and yields the values as `located` does."""
BATCH_ROWS = 256
_FIELDS_SHOWN = 80
_ARROW_FILE = b"ARROW1"
"""The first bytes of an Arrow file (Feather), as opposed to an Arrow stream."""
_IMAGES = ("image", "images", "bytes")
"""Keys whose bytes are not decoded as text: images in some formats are valid text."""


class Format(NamedTuple):
    """How a file is read. `suffix` is without the compression: ".jsonl" for rows.jsonl.gz; "" if READERS lacks the
    suffix, and the file is read as JSON. `compression` is the suffix of the compression, or ""."""

    suffix: str
    compression: str

    @property
    def is_json(self) -> bool:
        """Whether the file, once decompressed, holds the rows as JSON."""
        return READERS.get(self.suffix, located) is located


def format_of(path: Path, begin: bytes = b"") -> Format:
    """Return a file's format by its name; if the name has no compression, the first bytes (`begin`) may show one."""
    *_, before, last = ("", "", *(suffix.lower() for suffix in path.suffixes))
    compression = last if last in COMPRESSIONS else ""
    suffix = before if compression else last
    compression = compression or next((name for name, sign in COMPRESSIONS.items() if re.match(sign, begin)), "")
    return Format(suffix if suffix in READERS else "", compression)


def is_data_file(path: Path) -> bool:
    """Whether a file in a folder counts as a data file: its suffix is in READERS, but not in TEXTS."""
    return format_of(path).suffix not in ("", *TEXTS)


def decompress(path: Path, compression: str, target: BinaryIO) -> None:
    """Write the decompressed content of a file to `target`. A damaged file is a UserError, a full disk an OSError."""
    try:
        with _opened(path, compression) as stream:
            while piece := stream.read(1 << 20):
                target.write(piece)
    except ImportError as error:  # a Python that was built without the compression's library
        raise UserError(f"{path}: this Python cannot read {compression} ({error}); decompress it") from None
    except Exception as error:  # each library has its own errors for a damaged file
        if isinstance(error, OSError) and error.errno:  # the target's error; a damaged file's error has no number
            raise
        raise UserError(
            f"{path}: cannot be decompressed ({error}); check that it is a complete {compression} file"
        ) from None


def _opened(path: Path, compression: str) -> Any:
    if compression == ".utf16":
        return codecs.EncodedFile(path.open("rb"), "utf-8", "utf-16")
    if compression == ".zst":
        import pyarrow

        return pyarrow.input_stream(str(path), compression="zstd")
    return importlib.import_module({".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}[compression]).open(path)


COMPRESSIONS = {
    ".gz": rb"\x1f\x8b",
    ".bz2": rb"BZh91AY&SY",
    ".xz": rb"\xfd7zXZ\x00",
    ".zst": rb"\(\xb5/\xfd",
    ".utf16": rb"\xff\xfe(?!\0\0)|\xfe\xff",
}
"""Patterns of the first bytes of compressed files; no text begins like these. UTF-32 begins as UTF-16 does."""


def _delimited(stream: BinaryIO, name: str, delimiters: str) -> Iterator[Located]:
    """Yield the rows below a table's header, with each field as text. The delimiter is the first of `delimiters` that
    the header has outside quotes."""
    stream.seek(0)
    header_line = re.sub(rb'"[^"]*"', b"", stream.readline(MAX_ROW_BYTES))
    delimiter = next((mark for mark in delimiters if mark.encode() in header_line), delimiters[0])
    stream.seek(0)
    csv.field_size_limit(min(sys.maxsize, (1 << 31) - 1))  # a cell may hold a chat; the default is 128 KiB
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    header, line = None, 0
    try:
        for count, record in _records(text, delimiter):
            begin, line = line + 1, line + count
            if not record:  # an empty line
                continue
            if header is None:
                header = [text if text.strip() else f"Unnamed: {at}" for at, text in enumerate(record)]  # as pandas
                if problem := _doubled(header):
                    yield Located(ValueError(f"the header has {problem}"), begin)
                    return
            elif [record[0].removeprefix("\ufeff") or header[0], *record[1:]] == header:
                yield Located(ValueError("this line repeats the header, as in joined files; remove it"), begin)
            elif len(record) != len(header):
                shown = ", ".join(header)[:_FIELDS_SHOWN]
                problem = f"{len(record)} fields, but the header has {len(header)} ({shown})"
                yield Located(ValueError(problem), begin)
            else:
                row = dict(zip(header, record, strict=True))
                yield Located(row, begin, json.dumps(row).encode())
    except csv.Error as error:
        yield Located(ValueError(f"not CSV ({error}); the rest was not read; write JSON Lines"), line + 1)
    except UnicodeDecodeError as error:
        raise not_utf8(f"{name}:{line + 1}", "in this line or a later one", error.object) from None
    finally:
        text.detach()  # otherwise `text` would close the caller's stream


def _records(lines: Iterable[str], delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yield how many lines a record of a table takes, and the record, in pairs. Quotes may enclose delimiters and line
    breaks. But tables with tabs are often written without quoting, so quotes around what looks like several rows are
    refused."""
    taken = list[str]()

    def recorded() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line

    cell = re.compile(rf'(^|{re.escape(delimiter)})"[^"]*(?:""[^"]*)*"')
    apart = re.compile(rf'{re.escape(delimiter)} +"')
    width = 0
    for record in csv.reader(recorded(), delimiter=delimiter, strict=True):
        text = "".join(taken)
        if apart.search(text) and apart.search(cell.sub("", text)):
            raise csv.Error(f"a blank between {delimiter!r} and a quote, which is then plain text: remove such blanks")
        if delimiter == "\t" and len(taken) > 1 < width and all(line.count("\t") == width - 1 for line in taken):
            raise csv.Error("quotes around tabs and line breaks may belong to the text of several rows")
        width = width or len(record)
        yield len(taken), record
        taken.clear()


def _doubled(columns: list[str]) -> str:
    """Return what is wrong if two columns have the same name; "" if all names differ."""
    for column in columns:
        if columns.count(column) > 1:
            return f"the column {column[:_FIELDS_SHOWN]!r} twice; rename one of the two"
    return ""


def _columns(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The rows of a Parquet file, of an Arrow file (Feather), or of an Arrow stream, which `datasets` saves."""
    import pyarrow
    from pyarrow import ipc, parquet

    stream.seek(0)
    mark = stream.read(6)
    stream.seek(0)
    number = 0
    try:
        tables: Any
        if mark.startswith(b"PAR1"):
            tables = parquet.ParquetFile(stream).iter_batches(BATCH_ROWS)
        elif mark == _ARROW_FILE:
            file = ipc.open_file(stream)
            tables = map(file.get_batch, range(file.num_record_batches))
        else:
            tables = ipc.open_stream(stream)
        for row in arrow_rows(tables, name):
            number = row.number
            yield row
    except (pyarrow.ArrowException, OSError) as error:
        cause = " ".join(str(error).split())[:200]
        raise UserError(f"{name}: not Parquet or Arrow after row {number} ({cause}); is the file complete?") from None


def arrow_rows(tables: Iterable[Any], name: str) -> Iterator[Located]:
    """Yield the rows of Arrow tables or batches, each with its number (from 1)."""
    numbers = itertools.count(1)
    for table in tables:
        if problem := _doubled(table.schema.names):
            raise UserError(f"{name}: the file has {problem}")
        described = json.loads((table.schema.metadata or {}).get(b"huggingface", "{}"))
        features = described.get("info", {}).get("features", {})
        for row in table.to_pylist():
            row = {field.name: _as_written(row[field.name], field.type, field.name) for field in table.schema}
            row = {name: _labelled(value, features.get(name)) for name, value in row.items()}
            yield row_as_json(row, next(numbers))


def _labelled(value: Any, feature: Any) -> Any:
    """A value with class names in place of class numbers, if `datasets` describes it as a ClassLabel or a list of
    ClassLabels; -1, which stands for no class, becomes null."""
    if not isinstance(feature, dict):
        return value
    if isinstance(value, list):
        return [_labelled(element, feature.get("feature")) for element in value]
    if feature.get("_type") != "ClassLabel" or not feature.get("names") or not isinstance(value, int):
        return value
    return feature["names"][value] if value >= 0 else None


def _as_written(value: Any, type: Any, name: str) -> Any:
    """A value as it was before Arrow gave all objects of a column the same keys: without keys that are null, unless a
    key is null in every row. UTF-8 bytes become text. A 32- or 16-bit float becomes the shortest decimal that rounds
    to it: 0.1, not 0.10000000149011612."""
    if isinstance(value, dict):
        given = [field for field in type if value[field.name] is not None or str(field.type) == "null"]
        return {field.name: _as_written(value[field.name], field.type, field.name) for field in given}
    if isinstance(value, list) and hasattr(type, "value_type"):
        return [_as_written(element, type.value_type, name) for element in value]
    # older versions of pyarrow give numpy's half floats
    if isinstance(value, float) or value.__class__.__name__ == "float16":
        import numpy as np  # not at the top: authors of tasks import this module

        bits = getattr(type, "value_type", type).bit_width  # of a dictionary-encoded column: the values' type
        return float(str({16: np.float16, 32: np.float32}.get(bits, float)(value)))
    if isinstance(value, list) and hasattr(type, "item_type"):
        pairs = [(key, _as_written(item, type.item_type, name)) for key, item in value]
        held = dict(pairs)
        return held if len(held) == len(pairs) and all(isinstance(key, str) for key in held) else pairs
    if isinstance(value, bytes) and name not in _IMAGES and b"\0" not in value:  # some programs write texts as bytes
        with contextlib.suppress(UnicodeDecodeError):
            return value.decode()
    if isinstance(value, str) and getattr(type, "extension_name", "") == "arrow.json":  # a type of `datasets`
        with contextlib.suppress(ValueError):
            return json.loads(value)
    return value


def row_as_json(row: dict[str, Any], number: int) -> Located:
    """Return a row of Python values as it would be read from JSON, with this number."""
    raw = json.dumps(row, default=_as_json).encode()
    return Located(json.loads(raw), number, raw)


def _as_json(value: Any) -> Any:
    """Replace a value that JSON cannot hold. Bytes become an object, which `picture_of` reads and no parser takes for
    text."""
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    is_bytes = isinstance(value, bytes)
    return {"base64": base64.b64encode(value).decode()} if is_bytes else {"unknown": type(value).__name__}


def _document(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Yield a text file as one row, {"text": ...}; a file that contains rows of JSON is read as JSON."""
    stream.seek(0)
    content = stream.read(MAX_ROW_BYTES + 1)
    if _ROWS_OF_JSON.match(content):
        yield from located(stream, name)
        return
    if len(content) > MAX_ROW_BYTES:
        raise UserError(f"{name}: more than {MAX_ROW_BYTES >> 20} MiB in one text; divide it into several files")
    yield row_as_json({"text": decoded(content, name, 1, 0).removeprefix("\ufeff")}, 1)


_ROWS_OF_JSON = re.compile(rb'(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*"')
TEXTS = (".txt", ".md")
"""Suffixes of text files. In a folder with other data, text files may describe that data."""


def has_lines(suffix: str, stream: BinaryIO) -> bool:
    """Whether messages name the rows of a decompressed file by line, and not by number."""
    return suffix in (".csv", ".tsv") or (suffix not in (".parquet", ".arrow", ".feather") and not is_array(stream))


READERS: dict[str, Reader] = {
    ".json": located,
    ".jsonl": located,
    ".ndjson": located,
    ".jsonlines": located,
    ".jl": located,
    ".csv": functools.partial(_delimited, delimiters=",;\t|"),
    ".tsv": functools.partial(_delimited, delimiters="\t,;"),
    ".parquet": _columns,
    ".arrow": _columns,
    ".feather": _columns,
    ".txt": _document,
    ".md": _document,
}
