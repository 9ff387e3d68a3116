"""Reads the values of a JSON array or of JSON Lines one by one, each with its line and its bytes.

Lines are read one at a time; of an array the text is held in memory, the values are not. Standard library only.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from accel_sft.api.errors import UserError

_MAX_DEPTH = 100  # Python's own limit moves with its version and the caller's stack
_MAX_NAME = 80
"""Characters of a field's name that a message repeats: a row may have as long a one as it likes."""
_BLANK = re.compile(r"[ \t\r\n]*")


class Located(NamedTuple):
    """One value, its first line (from 1), its first byte (from 0) and its bytes, which `json.loads` can read again.

    In place of a value that cannot be used stands the ValueError that says why.
    """

    value: Any
    line: int
    begin: int
    raw: bytes


class Malformed(ValueError):
    """What is wrong with a field of an object, by its name."""

    def __init__(self, field: str, expected: str) -> None:
        shown = repr(field) if len(field) <= _MAX_NAME else f"{field[:_MAX_NAME]!r}..."
        super().__init__(f"field {shown}: expected {expected}")


def located(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The values of an array or of lines, whichever the content is.

    Args:
        stream: at its beginning; a byte-order mark is accepted.
        name: the file's name in messages.
    Raises:
        UserError: bytes that are not UTF-8, by line.
    """
    begin = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
    stream.seek(begin)
    mark = b" "
    while mark.isspace():
        mark = stream.read(1)
    stream.seek(begin)
    if mark == b"[":
        yield from _array(_text(stream.read(), name, 1, begin), begin)
    else:
        yield from _lines(stream, name, begin)


def _text(raw: bytes, name: str, line: int, begin: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line, byte = line + raw.count(b"\n", 0, error.start), begin + error.start
        raise UserError(f"{name}:{line}: not UTF-8 (byte {byte}); save the file as UTF-8") from None


def _lines(stream: BinaryIO, name: str, begin: int) -> Iterator[Located]:
    for line, raw in enumerate(stream, 1):
        text = _text(raw, name, line, begin)
        if text.strip():
            yield Located(_decoded(text.removesuffix("\n")), line, begin, raw)
        begin += len(raw)


class _Bad:
    """Stands in a decoded value for a part that is not allowed, so that the rows after it are decoded too."""

    def __init__(self, problem: ValueError) -> None:
        self.problem = problem


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Bad:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            return _Bad(Malformed(key, "each key once, it stands here twice"))
        row[key] = value
    return row


def _no_constant(name: str) -> _Bad:
    return _Bad(ValueError(f"{name} is not JSON; use null or a number"))


_DECODER = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def _decoded(text: str) -> Any:
    try:
        return _checked(_DECODER.decode(text))
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON at column {error.colno}: {error.msg}")
    except RecursionError:
        return ValueError("nested too deeply")
    except ValueError as error:
        return error


def _checked(value: Any) -> Any:
    """The value, or the first problem in it."""
    return next(_problems_in(value), value)


def _problems_in(value: Any, depth: int = 0) -> Iterator[ValueError]:
    if isinstance(value, _Bad):
        yield value.problem
    elif depth > _MAX_DEPTH:
        yield ValueError("nested too deeply")
    elif isinstance(value, str):
        if re.search("[\ud800-\udfff]", value):
            yield ValueError("a lone surrogate (\\ud800-\\udfff) is not text; remove it")
    elif isinstance(value, (dict, list)):
        for part in value if isinstance(value, list) else chain.from_iterable(value.items()):
            yield from _problems_in(part, depth + 1)


def _array(text: str, offset: int) -> Iterator[Located]:
    """The elements of the array; the first syntax error ends it. `offset` is that of the first byte of `text`."""
    at, line = 0, 1

    def move(end: int) -> bytes:
        """Move on to the character at `end`; the bytes between."""
        nonlocal at, line, offset
        raw = text[at:end].encode()
        at, line, offset = end, line + text.count("\n", at, end), offset + len(raw)
        return raw

    def mark() -> str:
        """The next character that is not blank, or nothing at the end."""
        move(_BLANK.match(text, at).end())
        return text[at : at + 1]

    def problem(what: object) -> Located:
        return Located(ValueError(what), line, offset, b"")

    move(text.index("[") + 1)
    first = True
    while mark() != "]":
        if not first:
            if mark() != ",":
                yield problem("expected ',' or ']' here; is the file cut off?")
                return
            move(at + 1)
            if mark() == "]":
                yield problem("a comma before ']' announces a row that is not there")
                break
        first = False
        try:
            value, end = _DECODER.raw_decode(text, at)
        except json.JSONDecodeError as error:
            move(error.pos)
            yield problem(f"not JSON: {error.msg}; the rest is unread")
            return
        except (ValueError, RecursionError) as error:
            yield problem(f"{'nested too deeply' if isinstance(error, RecursionError) else error}; the rest is unread")
            return
        yield Located(_checked(value), line, offset, move(end))
    if rest := text[at + 1 :].strip()[:20]:
        yield problem(f"text after the end of the array: {rest!r}")
