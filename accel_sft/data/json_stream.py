"""The values of a JSON array or of JSON Lines, one by one, each with its line and its bytes. Standard library only."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, NamedTuple

from accel_sft.api.errors import UserError

_MAX_DEPTH = 100  # Python's own limit moves with its version and the caller's stack
_BLOCK = 1 << 16
_LONGEST_NAME = 80
"""Characters of a field's name that a message repeats: a row may have as long a one as it likes."""
_BLANK = re.compile(r"[ \t\r\n]*")


class Located(NamedTuple):
    """One value, its first line and byte, and its bytes, which `json.loads` reads again.

    A value that is not what it should be is the ValueError that says why.
    """

    value: Any
    line: int
    begin: int
    raw: bytes


class Malformed(ValueError):
    """What is wrong with a field of an object, by its name."""

    def __init__(self, field: str, expected: str) -> None:
        told = repr(field) if len(field) <= _LONGEST_NAME else f"{field[:_LONGEST_NAME]!r}..."
        super().__init__(f"field {told}: expected {expected}")


def located(stream: BinaryIO, name: str) -> Iterator[Located]:
    """The values of an array or of lines, told apart by content; not much more than one of them is held at a time.

    Args:
        stream: at its beginning; a byte-order mark is accepted.
        name: what to call it.
    Raises:
        UserError: bytes that are not UTF-8, by line.
    """
    begin = len(codecs.BOM_UTF8) if stream.read(3) == codecs.BOM_UTF8 else 0
    stream.seek(begin)
    at, line, block = begin, 1, b""
    while not block.lstrip() and (block := stream.read(_BLOCK)):
        blank = len(block) - len(block.lstrip())
        at, line = at + blank, line + block.count(b"\n", 0, blank)
    if block.lstrip()[:1] == b"[":
        yield from _array(_Window(stream, name, at, line))
    else:
        stream.seek(begin)
        yield from _lines(stream, name, begin)


def _lines(stream: BinaryIO, name: str, begin: int) -> Iterator[Located]:
    for line, raw in enumerate(stream, 1):
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(name, line, begin + error.start) from None
        if text.strip():
            yield Located(_decoded(text.removesuffix("\n")), line, begin, raw)
        begin += len(raw)


def _not_utf8(name: str, line: int, byte: int) -> UserError:
    return UserError(f"{name}:{line}: not UTF-8 (byte {byte}); save the file as UTF-8")


class _Bad:
    """Stands in a decoded value for what must not be there, so that decoding goes on to the rows behind it."""

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
    for problem in _problems_in(value):
        raise problem
    return value


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


class _Window:
    """The part of an array's text that is looked at: it moves on, and grows while a value does not end within it."""

    def __init__(self, stream: BinaryIO, name: str, offset: int, line: int) -> None:
        stream.seek(offset)
        self._stream, self._name, self._decode = stream, name, codecs.getincrementaldecoder("utf-8")().decode
        self.text, self.at, self.ended = "", 0, False
        self.offset, self.line = offset, line  # of the character at `at`
        self._more()

    def _more(self) -> None:
        rest = self.text[self.at :]
        raw = self._stream.read(max(_BLOCK, len(rest)))
        self.ended = not raw
        try:
            self.text, self.at = rest + self._decode(raw, self.ended), 0
        except UnicodeDecodeError as error:
            line = self.line + rest.count("\n") + error.object.count(b"\n", 0, error.start)
            raise _not_utf8(self._name, line, self._stream.tell() - len(error.object) + error.start) from None

    def move(self, end: int) -> bytes:
        """Move on to the character at `end`; the bytes that were passed."""
        passed = self.text[self.at : end]
        raw = passed.encode()
        self.at, self.offset, self.line = end, self.offset + len(raw), self.line + passed.count("\n")
        return raw

    def mark(self) -> str:
        """The next character that is not blank, which then stands at `at`; none at the end."""
        while True:
            self.move(_BLANK.match(self.text, self.at).end())
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._more()

    def value(self) -> tuple[Any, int]:
        """The value that stands at `at`, and where it ends; it may go on behind the window, and so may an error."""
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.at)
                if end < len(self.text) or self.ended:
                    return value, end
            except (ValueError, RecursionError):
                if self.ended:
                    raise
            self._more()

    def rest(self) -> str:
        """Up to twenty characters that are left."""
        self.mark()
        while len(self.text) - self.at < 20 and not self.ended:
            self._more()
        return self.text[self.at :].strip()[:20]


def _array(window: _Window) -> Iterator[Located]:
    """Elements one by one, so that each is named by its own line; the array ends at the first syntax error."""

    def problem(text: str, line: int | None = None) -> Located:
        return Located(ValueError(text), line or window.line, window.offset, b"")

    window.move(window.at + 1)
    expect_comma = after_comma = False
    while True:
        mark = window.mark()
        line = window.line
        if mark == "]":
            if after_comma:
                yield problem("a comma before ']' announces a row that is not there")
            window.move(window.at + 1)
            if rest := window.rest():
                yield problem(f"text after the end of the array: {rest!r}", line)
            return
        if expect_comma:
            if mark != ",":
                yield problem("expected ',' or ']' here; is the file cut off?")
                return
            window.move(window.at + 1)
            expect_comma, after_comma = False, True
            continue
        try:
            value, end = window.value()
        except json.JSONDecodeError as error:
            line += window.text.count("\n", window.at, error.pos)
            yield problem(f"not JSON: {error.msg}; the rest is unread", line)
            return
        except (ValueError, RecursionError) as error:
            cause = "nested too deeply" if isinstance(error, RecursionError) else error
            yield problem(f"{cause}; the rest is unread")
            return
        try:
            checked = _checked(value)
        except ValueError as error:
            checked = error
        begin = window.offset
        yield Located(checked, line, begin, window.move(end))
        expect_comma, after_comma = True, False
