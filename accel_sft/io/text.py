"""Formats text and numbers that come from models, tasks and files; escapes control characters and markdown markup."""

import re
from collections.abc import Sequence
from typing import Any

CELL_CHARACTERS = 300
"""Maximum number of characters of a value in a markdown cell; a longer value is cut, and the cell says by how many."""
LINE_CHARACTERS = 60
LONGEST_ERROR = 300
"""Maximum number of characters of a task's or library's error that a message repeats."""
MISSING_VALUES = {
    *("nan", "NaN", "-nan", "NaT", "None", "null", "NULL", "(null)", "undefined", r"\N", "<NA>", "#N/A", "#NA"),
    *("<noinput>", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NULL!", "#NUM!"),
}
"""Texts that programs write for a missing value, as a whole field or as a question's last line (Alpaca's input)."""
_MARKUP = re.compile(r"[&<>|*`\\~$]|(?<![^\W_])_|_(?![^\W_])|(?<=\])[(\[:]")
"""Markup that has an effect in a cell; an underscore within a word has none, nor a bracket without a link target."""


def one_line(text: str, length: int = LINE_CHARACTERS) -> str:
    """The first `length` characters, control characters escaped: generated text must not steer a terminal."""
    shortened = text if len(text) <= length else text[:length] + "..."
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode() for mark in shortened)


def printable(text: str) -> str:
    """`text` with all control characters except line breaks escaped: a file's content must not steer a terminal."""
    return "\n".join(one_line(line, len(line)) for line in text.split("\n"))


def shown(value: Any) -> str:
    """Format a float with four digits or, from 1,000 on, as a whole number; None as "", anything else as text."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def markdown_cell(value: Any) -> str:
    """Any value as one cell of a markdown table: line breaks stay, markup is escaped."""
    text = str(value)
    if len(text) > CELL_CHARACTERS:
        text = f"{text[:CELL_CHARACTERS]}... ({len(text) - CELL_CHARACTERS:,} more characters)"
    lines = (one_line(line, len(line)) for line in text.splitlines())
    return "<br>".join(_MARKUP.sub(lambda mark: f"&#{ord(mark[0])};", line) for line in lines)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A markdown table of escaped cells."""
    lines = [" | ".join(map(markdown_cell, line)) for line in [header, *rows]]
    lines.insert(1, " | ".join(["---"] * len(header)))
    return "\n".join(f"| {line} |" for line in lines)


def common_length(sequences: Sequence[str] | Sequence[list[int]]) -> int:
    """Return how many leading characters or tokens all sequences have in common."""
    # the first and the last in sorted order have the least in common; slices are compared faster than Python loops
    first, last = min(sequences), max(sequences)
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == last[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
