"""Reads lists of messages, with OpenAI's keys (role, content) or ShareGPT's (from, value), into the same turns."""

from __future__ import annotations

import json
from typing import Any

from accel_sft import RowProblem

Turn = dict[str, Any]
"""A message with `role` (system, user, assistant or tool) and `content`.

If given: `tool_calls`, `tool_call_id`, `name`, `reasoning_content`; an assistant's `weight`, from 0 to 1, if the row
says whether the turn is learnt, or how much its loss counts; and `images`, a path for each <image> in the content, None
for one from the row's column.
"""

IMAGE = "<image>"
"""The mark that stands for an image in a text."""

IN_PROMPT = "in_prompt"
"""Key that marks a turn from a row's prompt column, which is not learnt."""
_IMAGES = ("image", "image_url")
"""Types of a message's parts that are images."""
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "function_call": "calls",
    "tool_call": "calls",
}


def read_turns(value: Any, field: str) -> tuple[list[Turn], bool]:
    """The turns of a list of messages (or of JSON of one), and whether they have ShareGPT's keys.

    Raises:
        RowProblem: a message is malformed; its number and field are named.
    """
    if isinstance(value, str):
        try:
            value = json_in(value)
        except ValueError as error:
            raise RowProblem(field, f"a list of messages, or JSON of one ({error})") from None
    if not isinstance(value, list) or not value:
        raise RowProblem(field, f"a list of messages, got {kind(value)}")
    sharegpt = any(isinstance(message, dict) and message.get("from") is not None for message in value)
    return [_turn(message, f"{field}[{number}]") for number, message in enumerate(value)], sharegpt


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
        ValueError: the text is no JSON, or has a key twice, NaN or a lone surrogate, which could not be kept.
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
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a key twice among {', '.join(key for key, _ in pairs)}"[:80])
    return found


def _turn(message: Any, field: str) -> Turn:
    if not isinstance(message, dict):
        raise RowProblem(field, f"a message, an object with role and content, got {kind(message)}")
    names = ("from", "value") if message.get("from") is not None else ("role", "content")
    role = message.get(names[0])
    if not isinstance(role, str) or role.lower() not in _ROLES:
        known = "system, user, assistant or tool (human, gpt, function_call, observation)"
        raise RowProblem(f"{field}.{names[0]}", f"{known}, got {kind(role)}")
    role = _ROLES[role.lower()]
    if role == "calls":
        where, text = f"{field}.{names[1]}", message.get(names[1])
        turn = {"role": "assistant", "content": "", "tool_calls": _calls(_json(text, where), where)}
    else:
        turn = {"role": role, "content": ""}
        if which := _calling(message, role, field):
            turn["tool_calls"] = _calls(_json(message[which], f"{field}.{which}"), f"{field}.{which}")
        given, where = message.get(names[1]), f"{field}.{names[1]}"
        turn["content"] = _content(given, where, role, bool(turn.get("tool_calls")))
        if images := _images(given, where):
            turn["images"] = images
    for name in ("name", "tool_call_id", "reasoning_content"):
        if message.get(name) is not None:
            if not isinstance(message[name], str):
                raise RowProblem(f"{field}.{name}", f"text, got {kind(message[name])}")
            turn[name] = message[name]
    if turn["role"] == "assistant" and (mark := _mark(message, field)) is not None:
        turn["weight"] = mark
    return turn


def _calling(message: Turn, role: str, field: str) -> str:
    """The key under which a message calls tools; "" if it calls none."""
    found = [which for which in ("tool_calls", "function_call") if message.get(which)]
    if found and role != "assistant":
        raise RowProblem(f"{field}.{found[0]}", f"no call in a turn of the {role}: the assistant calls tools")
    if len(found) > 1:
        raise RowProblem(f"{field}.function_call", "calls in it or in tool_calls, not in both")
    return found[0] if found else ""


def _content(value: Any, field: str, role: str, called: bool) -> str:
    if isinstance(value, str):
        return value
    if value is None and called:
        return ""
    if isinstance(value, list) and value and all(isinstance(part, dict) and "type" in part for part in value):
        images = any(part["type"] in _IMAGES for part in value)
        for number, part in enumerate(value):
            if part["type"] in _IMAGES:
                continue
            if part["type"] != "text" or not isinstance(part.get("text"), str):
                raise RowProblem(f"{field}[{number}]", f"a part of type text or image, got {kind(part['type'])}")
            if images and IMAGE in part["text"]:
                raise RowProblem(f"{field}[{number}].text", f"a text without {IMAGE}, as images are parts here")
        return "".join(IMAGE if part["type"] in _IMAGES else part["text"] for part in value)
    if role == "tool" and isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    raise RowProblem(field, f"text, got {kind(value)}")


def _images(value: Any, field: str) -> list[str | None]:
    """The path of each part that is an image; None if the row's column has it."""
    parts = enumerate(value if isinstance(value, list) else ())
    return [_path(part, f"{field}[{number}]") for number, part in parts if part["type"] in _IMAGES]


def image_address(image: Any) -> Any:
    """An image's path or address. Its bytes, which `read_rows` gives as {"base64": ...}, win over a path beside them,
    and become a data: address."""
    if not isinstance(image, dict):
        return image
    content = image.get("bytes") or image
    if isinstance(content, dict):
        content = content.get("base64")
    return f"data:image/*;base64,{content}" if content else image.get("url", image.get("path"))


def _path(part: Turn, field: str) -> str | None:
    given = next((part[name] for name in ("image", "path", "url", "image_url") if part.get(name) is not None), None)
    given = image_address(given)
    if given is not None and not isinstance(given, str):
        raise RowProblem(field, f"an image by its path, got {kind(given)}")
    return given


def _json(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json_in(value)
    except ValueError as error:
        expected = f'JSON of a call, {{"name": ..., "arguments": {{...}}}}, got {kind(value)} ({error})'
        raise RowProblem(field, expected) from None


def _calls(value: Any, field: str) -> list[Turn]:
    """Calls of tools in OpenAI's form, with their arguments, often given as a JSON text, as an object."""
    found = []
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem(f"{field}[{number}]", f"a call with a name and arguments, got {kind(call)}")
        arguments = function.get("arguments", function.get("parameters"))
        where = f"{field}[{number}].arguments"
        arguments = {} if arguments in (None, "") else _json(arguments, where)
        if not isinstance(arguments, dict):
            raise RowProblem(where, f"an object, or JSON of one, got {kind(arguments)}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        found.append({"type": "function", **named, "function": {"name": function["name"], "arguments": arguments}})
    if not found:
        raise RowProblem(field, "at least one call, got none")
    return found


def _mark(message: Turn, field: str) -> float | None:
    """An assistant turn's weight from 0 to 1, by OpenAI's `weight` or Axolotl's `train`; None if it has neither."""
    weight, train = message.get("weight"), message.get("train")
    if weight is not None and (type(weight) not in (int, float) or not 0 <= weight <= 1):
        got = weight if type(weight) in (int, float) else kind(weight)
        raise RowProblem(f"{field}.weight", f"a number from 0 to 1, got {got}")
    if train is not None and not isinstance(train, bool):
        raise RowProblem(f"{field}.train", f"true or false, got {kind(train)}")
    if weight is not None and train is not None and bool(weight) != train:
        raise RowProblem(f"{field}.train", f"the same as weight {weight}, got {train}")
    return int(train) if weight is None and train is not None else weight
