"""Finds out by a probe how a chat template takes tool calls, and whether a rendering contains them."""

import json
from collections.abc import Callable
from typing import Any

from accel_sft.chat.conversation import Turns
from accel_sft.chat.template import Rejected

_PROBE = {"id": "call00001", "type": "function", "function": {"name": "probe", "arguments": {"of": "a call"}}}
_AS_PYTHON = str(_PROBE["function"]["arguments"])


def with_text_arguments(turns: Turns) -> Turns:
    """The turns with the arguments of tool calls as JSON text."""
    return [
        {**turn, "tool_calls": [_with_text(call) for call in turn["tool_calls"]]} if "tool_calls" in turn else turn
        for turn in turns
    ]


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}


def takes_text_only(render: Callable[[Turns], list[str]]) -> bool:
    """Whether a template writes the arguments of a call only if they are given as text. For an object it then writes
    nothing, or what Python prints, or it fails (DeepSeek's templates add a text to the arguments)."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [_PROBE]}]

    def writes(given: Turns) -> bool:
        try:
            (text,) = render(given)
        except Rejected:
            return False
        return not lost([_PROBE], text) and _AS_PYTHON not in text

    return not writes(turns) and writes(with_text_arguments(turns))


def lost(calls: list[dict[str, Any]], rest: str) -> str | None:
    """The first name of a called tool or of an argument that is missing after the prompt; None if all are there."""
    functions = [call["function"] for call in calls]
    names = [name for function in functions for name in (function["name"], *function["arguments"])]
    return next((name for name in names if name not in rest), None)
