"""Recognises a row's published form by its columns: chat messages, prompt and completion, Alpaca's, or raw text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from accel_sft import RowProblem
from accel_sft_chat.images import with_images
from accel_sft_chat.messages import IN_PROMPT, Turn, json_in, kind, read_turns

COLUMNS = {
    "messages": ("messages", "conversations"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction",),
    "input": ("input",),
    "output": ("output",),
    "history": ("history",),
    "system": ("system",),
    "tools": ("tools", "functions"),
    "images": ("images", "image"),
    "text": ("text",),
}
"""Names by which the column of each kind is recognised; `--columns` gives a kind another name."""
RAW_TEXT = "raw text"
_FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))
_SAID = ("content", "tool_calls", "function_call")
_SHOWN = 8


class RowTurns(NamedTuple):
    """A row as it was read.

    Attributes:
        form: its form in words, with the names of its columns; raw text begins with RAW_TEXT, and is its only turn.
        turns: its turns, unchanged.
        system_text: the text of its system column, or "".
        tools: the schemas of its tools.
        notes: what was done to the row, and which columns of `--columns` it lacks.
    """

    form: str
    turns: list[Turn]
    system_text: str
    tools: list[dict[str, Any]] | None
    notes: tuple[str, ...] = ()


def named_columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """Read `--columns`: pairs of what a column holds and its name.

    Raises:
        ValueError: the text is malformed; the message says how, in a phrase.
    """
    pairs = []
    for part in (text or "").split(",") if text else ():
        what, _, column = (each.strip() for each in part.partition("="))
        if what not in COLUMNS:
            raise ValueError(f"{what!r} is not one of {', '.join(COLUMNS)}")
        if not column:
            raise ValueError(f"{what} has no column; write {what}=NAME")
        if what in dict(pairs):
            raise ValueError(f"{what} is named twice")
        if column in dict(pairs).values():
            raise ValueError(f"the column {column} is named for two things")
        pairs.append((what, column))
    return tuple(pairs)


def read_row(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...], folder: str = "") -> RowTurns:
    """Read a row in any of the known forms.

    Args:
        columns: the pairs that `named_columns` returns.
        folder: the folder that the paths of images are relative to.
    Raises:
        RowProblem: the form is unknown, or a field does not hold what it should.
    """
    named = dict(columns)
    column, forms = _recognised(tuple(row), columns)
    form = next((form for form in forms if row[column(form[0])] is not None), None)
    if form is None:
        raise _unknown(row, named.values())
    first = column(form[0])
    if form[0] == "text":
        unread = ", ".join(key[:80] for key in row if key != first)
        turns = [{"role": "assistant", "content": _text(row, first, needed=True)}]
        return RowTurns(f"{RAW_TEXT} (column {first}{unread and f'; not read: {unread}'})", turns, "", None)
    system_text, tools = _text(row, column("system")), _tools(row, column("tools"))
    if form[0] == "messages":
        turns, is_sharegpt = read_turns(row[first], first)
        form = f"ShareGPT (column {first}: from, value)" if is_sharegpt else f"messages (column {first}: role, content)"
    elif form[0] == "prompt":
        turns = _pair(row, first, second := column("completion"))
        form = f"prompt and completion (columns {first}, {second})"
    else:
        asked = [_text(row, first), _text(row, column("input"))]
        question = {"role": "user", "content": "\n".join(part for part in asked if part.strip())}
        answer = {"role": "assistant", "content": _text(row, second := column("output"), needed=True)}
        turns = [*_history(row, column("history")), question, answer]
        form = f"Alpaca (columns {first}, input, {second})"
    turns, notes = with_images(turns, row.get(images := column("images")), images, folder)
    missing = (f"without the column {name}, which --columns names" for name in named.values() if name not in row)
    return RowTurns(form, turns, system_text, tools, (*missing, *notes))


@functools.lru_cache(64)  # most files have few sets of columns
def _recognised(
    row: tuple[str, ...], columns: tuple[tuple[str, str], ...]
) -> tuple[Callable[[str], str], list[tuple[str, ...]]]:
    """For rows with these columns: the column of each kind, "" if there is none, and the forms that they may have."""
    named = dict(columns)
    kinds = {what: (named[what],) if what in named else names for what, names in COLUMNS.items()}
    found = {what: next((name for name in names if name in row), "") for what, names in kinds.items()}
    # if columns were named, only the forms that have them are looked for
    forms = [form for form in _FORMS if not named.keys().isdisjoint(form)] or _FORMS
    return found.__getitem__, [form for form in forms if all(found[what] for what in form)]


def _unknown(row: Mapping[str, Any], named: Iterable[str]) -> RowProblem:
    there = ", ".join(key[:80] + " (null)" * (row[key] is None) for key in list(row)[:_SHOWN]) or "none"
    if absent := [name for name in named if name not in row]:
        return RowProblem(None, f"a column {' and '.join(absent)}, which --columns names, got {there}")
    return RowProblem(
        None,
        "columns messages or conversations, prompt and completion, instruction and output, or text, "
        f"got {there}; name others: --columns prompt=question,completion=answer",
    )


def _text(row: Mapping[str, Any], column: str, *, needed: bool = False) -> str:
    """A column's text; "" if there is none and none is needed."""
    value = row.get(column)
    if isinstance(value, str) or (value is None and not needed):
        return value or ""
    raise RowProblem(column, f"text, got {kind(value)}")


def _pair(row: Mapping[str, Any], prompt: str, completion: str) -> list[Turn]:
    """The turns of a prompt and a completion, each a text or a list of messages; no turn of the prompt is learnt."""
    asked, answered = _messages_in(row[prompt]), _messages_in(row[completion])
    turns = (
        read_turns(asked, prompt)[0]
        if isinstance(asked, list)
        else [{"role": "user", "content": _text(row, prompt, needed=True)}]
    )
    for turn in turns:
        turn[IN_PROMPT] = True
    if isinstance(answered, list):
        return [*turns, *read_turns(answered, completion)[0]]
    return [*turns, {"role": "assistant", "content": _text(row, completion, needed=True)}]


def _history(row: Mapping[str, Any], column: str) -> list[Turn]:
    """Alpaca's earlier turns, from a list of pairs of question and answer, or JSON of one as in a CSV cell."""
    pairs, turns = row.get(column), []
    if isinstance(pairs, str):
        try:
            pairs = json_in(pairs) if pairs.strip() else None
        except ValueError as error:
            raise RowProblem(column, f"JSON of a list of pairs, [[question, answer], ...] ({error})") from None
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs] if pairs else []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowProblem(f"{column}[{number}]", f"[question, answer], two texts, got {kind(pair)}")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _messages_in(value: Any) -> Any:
    """The messages that a text holds as JSON, as in a CSV cell; any other value unchanged.

    A text may also be a JSON list of something else, which the model is to read or to answer with.
    """
    if not isinstance(value, str) or value.lstrip()[:1] != "[":
        return value
    try:
        found = json_in(value)
    except ValueError:
        return value
    return found if isinstance(found, list) and found and all(map(_is_message, found)) else value


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= {"from", "value"} or ("role" in value and not value.keys().isdisjoint(_SAID))


def _tools(row: Mapping[str, Any], column: str) -> list[dict[str, Any]] | None:
    """The schemas of tools, from a list or JSON of one; None if there are none."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json_in(value) if value.strip() else None
        except ValueError as error:
            raise RowProblem(column, f"JSON of a list of tools ({error})") from None
    if not value:
        return None
    tools = value if isinstance(value, list) else [value]
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem(f"{column}[{number}]", f"a tool's schema, an object with a name, got {kind(tool)}")
    return [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
