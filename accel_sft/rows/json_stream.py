"""Reads the values of a JSON array or of JSON Lines one by one, each with its number and its bytes.

Lines are read one at a time. The text of an array is held in memory as a whole, its values are not.
"""

import codecs
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

from accel_sft.api.errors import UserError

_MAX_DEPTH = 100  # Python's own limit depends on its version and on the caller's stack
MAX_ROW_BYTES = 64 << 20
"""Maximum number of bytes of a line: a longer row cannot be trained on, and an endless line would fill the memory."""
_MAX_NAME = 80
"""Maximum number of characters of a field's name that a message repeats: names in a file may have any length."""
_BLANK = re.compile(r"[ \t\r\n]*")
_WRAPPED = re.compile(rb'(?m)^\s*\{\s*"(data|rows|examples|instances)"\s*:\s*\[\s*[{\]]')
"""The beginning of an object that has the rows under its only key."""


class Located(NamedTuple):
    """One value; its line, or its number in a file without lines (from 1); its bytes, which `json.loads` can read
    again; and for JSON Lines the position of its first byte (from 0).

    A value that cannot be used is replaced by the ValueError that says why.
    """

    value: Any
    number: int
    raw: bytes = b""
    begin: int = 0


class Written(float):
    """A number that prints as the file has it: the answer 12.50 is learnt as 12.50, not as 12.5."""

    def __new__(cls, text: str) -> "Written":
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text


Written.__name__ = "float"  # because tasks name the type of a value in messages


class RowProblem(ValueError):
    """What is wrong with one row: raised by the `parse` given to `read_rows`, which adds file and line.

    Args:
        field: the key, or a path such as `label.name`; None: the row as a whole.
        expected: what the field, or the row, should contain.
    """

    def __init__(self, field: str | None, expected: str) -> None:
        self.field, at = field, ""
        if field is not None:
            at = f"field {field!r}: " if len(field) <= _MAX_NAME else f"field {field[:_MAX_NAME]!r}...: "
        super().__init__(f"{at}expected {expected}")


class RowLeftOut(Exception):
    """Raised by the `parse` given to `read_rows` to leave a row out; its text, a phrase, is reported as the reason.

    For a malformed row raise RowProblem. RowLeftOut is for useless rows that published files are known to contain.
    """


class ParsedRow(NamedTuple):
    """An example that `parse` returns together with facts about its row.

    Attributes:
        group: rows with the same `group` (for example, the same prompt) are all held out or all trained on. With "",
            only equal rows stay together.
        notes: what `parse` did to the row; each note is counted over all rows.
        unread: names of the row's keys that `parse` did not read.
    """

    example: Any
    group: str = ""
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()


def located(stream: BinaryIO, name: str) -> Iterator[Located]:
    """Yield the values of a JSON array (also one in {"data": [...]}) or of JSON Lines; the content decides which.
    `name` is the file's name in messages."""
    end, begin = _array_end(stream)
    stream.seek(begin)
    if end is not None:
        yield from _array(decoded(stream.read(), name, 1, begin), end)
        return
    is_first = True
    for line in itertools.count(1):
        if not (raw := stream.readline(MAX_ROW_BYTES + 1)):
            return
        if len(raw) > MAX_ROW_BYTES:
            raise UserError(f"{name}:{line}: a line of more than {MAX_ROW_BYTES >> 20} MiB; give each row its own line")
        text = decoded(raw, name, line, begin)
        text = text.removeprefix("\ufeff")  # the byte-order mark of a file that was appended to another
        if is_first and text.strip() == "{":
            if stream.readline(MAX_ROW_BYTES).lstrip().startswith(b'"'):
                problem = ValueError("an object over several lines; write each row on one line: jq -c . FILE > NEW")
                yield Located(problem, line)
                return
            stream.seek(begin + len(raw))
        if text.strip():
            yield Located(_decoded(text.removesuffix("\n")), line, raw, begin)
            is_first = False
        begin += len(raw)


def is_array(stream: BinaryIO) -> bool:
    """Whether the stream has a JSON array of rows, which are named by number, and not JSON Lines."""
    return _array_end(stream)[0] is not None


def _array_end(stream: BinaryIO) -> tuple[str | None, int]:
    """Return what must follow an array of rows: "", or "}" if the array is in an object; None for JSON Lines. Also
    return the number of bytes of the byte-order mark."""
    stream.seek(0)
    begin = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
    stream.seek(begin)
    while (mark := stream.read(1)).isspace():
        pass
    if mark == b"[":
        return "", begin
    stream.seek(begin)
    wrapped = _WRAPPED.match(stream.read(_MAX_NAME))
    stream.seek(begin + (wrapped.end() if wrapped else 0))
    # if more lines begin like this, the file is JSON Lines with such a key in each line
    return ("}" if wrapped and not _WRAPPED.search(stream.read(MAX_ROW_BYTES)) else None), begin


def decoded(raw: bytes, name: str, line: int, begin: int) -> str:
    """Decode bytes that begin at this line and byte of a file; a UserError names the first byte that is not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line, byte = line + raw.count(b"\n", 0, error.start), begin + error.start
        raise not_utf8(f"{name}:{line}", f"byte {byte}", raw) from None


def not_utf8(place: str, where: str, content: bytes) -> UserError:
    """Return the error for content that is not UTF-8, and perhaps not text at all."""
    if b"\0" in content:
        is_utf32 = content[:4] in (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)
        other = "unpack it if it is an archive; UTF-16 needs a byte-order mark"
        fix = "convert it: iconv -f UTF-32 -t UTF-8 OLD > NEW" if is_utf32 else other
        return UserError(f"{place}: not text ({where}); {fix}")
    fix = "convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW (or from GB18030, SHIFT-JIS)"
    return UserError(f"{place}: not UTF-8 ({where}); {fix}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any] | ValueError:
    """Return an object or, if a key is repeated, an error (not raised, so that later rows are decoded too)."""
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            return RowProblem(key, "each key once, but this one is repeated")
        row[key] = value
    return row


_DECODER = json.JSONDecoder(
    object_pairs_hook=_no_duplicates,
    parse_float=Written,
    parse_constant=lambda name: ValueError(f"{name} is not JSON; use null or a number"),
)


def _decoded(text: str) -> Any:
    try:
        return _checked(_DECODER.decode(text))
    except (ValueError, RecursionError) as error:
        return ValueError(_reason(error))


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        return f"not JSON at {line}column {error.colno}: {error.msg}"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _checked(value: Any) -> Any:
    """The value, or the first problem in it."""
    return next(_problems_in(value), value)


def _problems_in(value: Any, depth: int = 0) -> Iterator[ValueError]:
    if isinstance(value, ValueError):
        yield value
    elif depth > _MAX_DEPTH:
        yield ValueError("nested too deeply")
    elif isinstance(value, str):
        if re.search("[\ud800-\udfff]", value):
            yield ValueError("a lone surrogate (\\ud800-\\udfff) is not text; remove it")
    elif isinstance(value, (dict, list)):
        for part in value if isinstance(value, list) else itertools.chain.from_iterable(value.items()):
            yield from _problems_in(part, depth + 1)


def _array(text: str, end: str) -> Iterator[Located]:
    """Yield the elements of the array in `text`, numbered from 1; then an error if its syntax or `end` is wrong."""
    number, at, mark = 0, text.index("["), "["
    while mark != "]":
        at = _behind_blanks(text, at + 1)
        if text.startswith("]", at):
            if mark == ",":
                yield Located(ValueError("a comma follows, but no row after the comma"), number)
            break
        number += 1
        try:
            value, behind = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            yield Located(ValueError(f"{_reason(error)}; the rest was not read"), number)
            return
        yield Located(_checked(value), number, text[at:behind].encode())
        at = _behind_blanks(text, behind)
        mark = text[at : at + 1]
        if mark not in (",", "]"):
            yield Located(ValueError("expected ',' or ']' after this row; is the file cut off?"), number)
            return
    if (rest := text[at + 1 :].strip()) != end:
        what = f"text after the end of the array: {rest[:20]!r}" if rest else f"expected {end!r} at the end"
        yield Located(ValueError(what), max(number, 1))


def _behind_blanks(text: str, at: int) -> int:
    blanks = _BLANK.match(text, at)
    assert blanks  # because the pattern also matches an empty text
    return blanks.end()
