"""Rows of a JSON or JSONL file, with the line each one stands on. Standard library only."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from accel_sft.options import UserError

MAX_PROBLEMS = 20
_MAX_DEPTH = 100  # Python's own limit moves with its version and the caller's stack
Row = TypeVar("Row")


class RowProblem(ValueError):
    """What is wrong with one row: raised by the `parse` given to `read_rows`, which adds file and line.

    Args:
        field: the key, or a path such as `label.name`.
        expected: what should have stood there.
    """

    def __init__(self, field: str, expected: str) -> None:
        super().__init__(f"field {field!r}: expected {expected}")


def read_rows(path: str | Path, parse: Callable[[dict[str, Any]], Row]) -> list[Row]:
    """Read a JSON array of objects or JSON Lines (told apart by content, not by name) and parse every row.

    Args:
        path: the file, UTF-8 (a byte-order mark is accepted).
        parse: turns an object into an example, or raises RowProblem.
    Raises:
        UserError: the file cannot be read, holds no row, or has bad rows: the first twenty, by file, line and field.
    """
    path = Path(path)
    text = _read_text(path)
    examples: list[Row] = []
    problems: list[str] = []
    for line, value in _objects(text):
        try:
            if isinstance(value, ValueError):
                raise value
            if not isinstance(value, dict):
                raise RowProblem("(row)", f"a JSON object, got {type(value).__name__}")
            examples.append(parse(value))
        except ValueError as problem:
            problems.append(f"{path}:{line}: {problem}")
    if problems:
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > len(shown):
            shown.append(f"{path}: and {len(problems) - len(shown)} more bad rows; nothing was trained")
        raise UserError(*shown)
    if not examples:
        raise UserError(f"{path}: no rows; expected a JSON array of objects or one JSON object per line")
    return examples


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give an existing JSON or JSONL file") from None
    raw = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8 (byte {error.start}); save the file as UTF-8") from None


class _Bad:
    """Stands in a decoded value for what must not be there, so that decoding goes on to the rows behind it."""

    def __init__(self, problem: ValueError) -> None:
        self.problem = problem


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any] | _Bad:
    row: dict[str, Any] = {}
    for key, value in pairs:
        if key in row:
            return _Bad(RowProblem(key, "each key once, it stands here twice"))
        row[key] = value
    return row


def _no_constant(name: str) -> _Bad:
    return _Bad(ValueError(f"{name} is not JSON; use null or a number"))


def _objects(text: str) -> Iterator[tuple[int, Any]]:
    """(line, value) of each row; a value that cannot be decoded is the ValueError that says why."""
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    if text.lstrip()[:1] == "[":
        yield from _array(text, decoder)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _decode(decoder, line)


def _decode(decoder: json.JSONDecoder, line: str) -> Any:
    try:
        return _checked(decoder.decode(line))
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


def _array(text: str, decoder: json.JSONDecoder) -> Iterator[tuple[int, Any]]:
    """Elements one by one, so that each is named by its own line; the array ends at the first syntax error."""
    position = text.index("[") + 1
    line, counted = 1, 0
    blank = re.compile(r"[ \t\r\n]*")
    expect_comma = after_comma = False
    while True:
        position = blank.match(text, position).end()
        line, counted = line + text.count("\n", counted, position), position
        mark = text[position : position + 1]
        if mark == "]":
            if after_comma:
                yield line, ValueError("a comma before ']' announces a row that is not there")
            rest = text[position + 1 :].strip()
            if rest:
                yield line, ValueError(f"text after the end of the array: {rest[:20]!r}")
            return
        if expect_comma:
            if mark != ",":
                yield line, ValueError("expected ',' or ']' here; is the file cut off?")
                return
            position, expect_comma, after_comma = position + 1, False, True
            continue
        try:
            value, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as error:
            yield line + text.count("\n", counted, error.pos), ValueError(f"not JSON: {error.msg}; the rest is unread")
            return
        except (ValueError, RecursionError) as error:
            cause = "nested too deeply" if isinstance(error, RecursionError) else error
            yield line, ValueError(f"{cause}; the rest is unread")
            return
        try:
            checked = _checked(value)
        except ValueError as error:
            checked = error
        yield line, checked
        expect_comma, after_comma = True, False
