"""Reads texts and JSON in a row's fields, and writes values as texts, with numbers as they are in the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from accel_sft import RowProblem
from accel_sft_chat.keys import AS_JSON, Remarks


def text_of(value: Any, field: str, remarks: Remarks) -> str:
    """The value itself if it is a text; the JSON text of a number, list or object."""
    if isinstance(value, str):
        return value
    if value is None:
        raise RowProblem(field, f"text, got {kind(value)}")
    if isinstance(value, dict) and value.keys() == {"base64"}:  # as `read_rows` gives bytes
        raise RowProblem(field, "text, got bytes that are not UTF-8")
    remarks.notes[AS_JSON] = None
    return as_json(value)


def as_json(value: Any) -> str:
    """JSON with numbers as they are in the file: 12.50, not 12.5. They are floats whose text `read_rows` keeps."""
    if isinstance(value, float):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(as_json, value))}]"
    if isinstance(value, dict):
        pairs = (f"{json.dumps(name, ensure_ascii=False)}: {as_json(held)}" for name, held in value.items())
        return f"{{{', '.join(pairs)}}}"
    return json.dumps(value, ensure_ascii=False)


def kind(value: Any) -> str:
    """A value in an error message: a text by its beginning, anything else by its type."""
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else repr(value[:40]) + "..."
    if isinstance(value, (list, dict)) and not value:
        return f"an empty {type(value).__name__}"
    return {type(None): "null or nothing"}.get(type(value), type(value).__name__)


def json_in(text: str) -> Any:
    """The value of a JSON text, read as strictly as rows are.

    Raises:
        ValueError: the text is not JSON, or has a duplicate key, NaN or a lone surrogate, which could not be kept.
    """
    try:
        value = json.loads(text, object_pairs_hook=_object)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate, \\ud800 to \\udfff, is not text") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError(f"a key twice among {', '.join(key for key, _ in pairs)}"[:80])
    return value


def functions_in(text: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """The JSON objects in a text that call a function by name: (begin, end, name and arguments)."""
    decoder, at = json.JSONDecoder(), 0
    while (at := text.find("{", at)) >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            at += 1
            continue
        function = value.get("function", value) if isinstance(value, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments", function.get("parameters"))
            if isinstance(arguments, dict):
                yield at, end, {"name": function["name"], "arguments": arguments}
                at = end
                continue
        at += 1
