"""Reads lists of messages, with OpenAI's keys (role, content) or ShareGPT's (from, value), into the same turns."""

from __future__ import annotations

import re
from typing import Any

from accel_sft import RowProblem
from accel_sft_chat.keys import REFUSED_IN_PARTS, REFUSED_IN_TURNS, Remarks, RowRefused
from accel_sft_chat.values import as_json, functions_in, json_in, kind, text_of

Turn = dict[str, Any]
"""A message with `role` (system, user, assistant or tool) and `content`.

It may also have `tool_calls`, `tool_call_id`, `name` and `reasoning_content`; `continued`, True for a text that the
answer continues; an assistant's `weight`, 0 or 1, if the row says whether the turn is learnt; and `images`, a path for
each <image> in the content, or None for an image in the row's column.
"""

IMAGE = "<image>"
"""The mark that stands for an image in a text."""

IN_PROMPT = "in_prompt"
"""Key that marks a turn from a row's prompt column, which is not learnt."""
_TEXTS = ("text", "input_text", "output_text")
_IMAGES = ("image", "image_url", "input_image")
"""Types of the parts of a message: of texts, and of images."""
_PATHS = ("image", "path", "url", "image_url", "source")
_ORDER = {"thinking": 0, "tool_result": 0, "": 1, "tool_use": 2}
"""Types of parts that are not content (""), and the order in which they stand before or after the content."""
_THINKING = ("reasoning_content", "reasoning", "thinking")
_MARKS = ("weight", "train", "loss")
_BESIDE = {"name", "tool_call_id", "tool_calls", "function_call", *_THINKING, *_MARKS}
_READ = {names: _BESIDE | {*names} for names in (("role", "content"), ("from", "value"))}
_READ_WITHOUT_CONTENT = _BESIDE | {"role", "content", "from", "value", "refusal"}
_ARGUMENTS = ("arguments", "parameters", "input", "args")
_IN_CALLS = {"id", "type", "index", "function", "name", *_ARGUMENTS}
_OTHERS_PARTS = {
    *("toolUse", "functionCall", "function_call", "toolResult", "functionResponse", "function_response"),
    *("reasoningContent", "inlineData", "inline_data", "fileData", "file_data", "guardContent", "cachePoint"),
    *("citationsContent", "searchResult", "executableCode", "executable_code"),
    *("codeExecutionResult", "code_execution_result"),
}
"""Keys under which Bedrock's and Gemini's parts hold an object."""
_FILES = ("image", "document", "video", "audio")
_IN_FILES = {"bytes", "data", "base64", "fileUri", "file_uri", "s3Location"}
_CALL_MARK = re.compile(
    r"<\|?(?:\w+:)?(?:tool|function)_?calls?\b.*?>|\[TOOL_CALLS?\]|<｜tool▁calls?▁begin｜>|<\|python_tag\|>|<function=",
    re.IGNORECASE,
)
"""How a tool call begins in the text that chat templates write."""
OTHERS_MARKED = "with turns marked to be learnt that are not the assistant's; these turns are not learnt"
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


def read_turns(value: Any, field: str, remarks: Remarks) -> tuple[list[Turn], bool]:
    """The turns of a list of messages (or of its JSON text), and whether the messages have ShareGPT's keys."""
    if isinstance(value, str):
        try:
            value = json_in(value)
        except ValueError as error:
            raise RowProblem(field, f"a list of messages, or its JSON text ({error})") from None
    if not isinstance(value, list) or not value:
        raise RowProblem(field, f"a list of messages, got {kind(value)}")
    sharegpt = any(isinstance(message, dict) and message.get("from") is not None for message in value)
    turns: list[Turn] = []
    for number, message in enumerate(value):
        for turn in _turns(message, where := f"{field}[{number}]", remarks):
            _refuse_written_calls(turns[-1:], turn, where)
            turns.append(turn)
    return turns, sharegpt


def _refuse_written_calls(before: list[Turn], turn: Turn, field: str) -> None:
    """Refuse tool calls that are also in the text of this turn, or of a turn joined to it, and so learnt twice."""
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    for turn_before in [*(other for other in before if other["role"] == "assistant"), turn] if calls else ():
        mark = _CALL_MARK.search(turn_before["content"])
        if mark or any(function in calls for _, _, function in functions_in(turn_before["content"])):
            got = kind(mark[0] if mark else turn_before["content"])
            raise RowProblem(field, f"tool calls only in tool_calls, not also as text in the content, got {got}")


def _turns(message: Any, field: str, remarks: Remarks) -> list[Turn]:
    """The turns of a message: usually one. Tool results in a user's message become turns before that turn."""
    if not isinstance(message, dict):
        raise RowProblem(field, f"a message, an object with role and content, got {kind(message)}")
    names = ("from", "value") if message.get("from") is not None else ("role", "content")
    role = message.get(names[0])
    if not isinstance(role, str) or role.lower() not in _ROLES:
        roles = "system, user, assistant or tool (human, gpt, function_call, observation)"
        raise RowProblem(f"{field}.{names[0]}", f"{roles}, got {kind(role)}")
    role = _ROLES[role.lower()]
    turn: Turn = {"role": role, "content": ""}
    given, where = message.get(names[1]), f"{field}.{names[1]}"
    remarks.look(message, _READ_WITHOUT_CONTENT if given is None else _READ[names], REFUSED_IN_TURNS, f"{field}.")
    if role != "tool":  # a tool's content may be any JSON
        _refuse_other_parts(given, where)
    results: list[Turn] = []
    if role == "calls":
        turn = {"role": "assistant", "content": "", "tool_calls": read_calls(_json(given, where), where, remarks)}
    else:
        blocks, given = _divided(given, role, where)
        results = [_result(block, f"{where}[{number}]", remarks) for number, block in enumerate(blocks["tool_result"])]
        if results and given is None:
            return results
        which = _calling(message, role, field)
        calls = read_calls(_json(message[which], f"{field}.{which}"), f"{field}.{which}", remarks) if which else []
        if calls := calls + (read_calls(blocks["tool_use"], where, remarks) if blocks["tool_use"] else []):
            turn["tool_calls"] = calls
        turn |= content_of(message.get("refusal") if given is None else given, where, role, bool(calls), remarks)
        if blocks["thinking"]:
            for number, block in enumerate(blocks["thinking"]):
                _look_at_part(block, {"type", "thinking"}, f"{where}[{number}]", remarks)
            texts = [content_of(block.get("thinking"), where, role, False, remarks) for block in blocks["thinking"]]
            message = {**message, "thinking": "\n\n".join(text["content"] for text in texts)}
    for name in ("name", "tool_call_id"):
        if message.get(name) is not None:
            turn[name] = _text(message[name], f"{field}.{name}")
    thoughts = {name: _text(message[name], f"{field}.{name}") for name in _THINKING if message.get(name) is not None}
    if len({*thoughts.values()} - {""}) > 1:
        raise RowProblem(field, f"one thinking, got different texts in {', '.join(thoughts)}")
    if thoughts and turn["role"] == "assistant":
        turn["reasoning_content"] = max(thoughts.values())
        marked = turn["content"].lstrip().startswith("<think>") or "</think>" in turn["content"]
        if turn["reasoning_content"] and marked:
            raise RowProblem(where, f"no <think>, because the thinking is in {next(iter(thoughts))}")
    elif any(thoughts.values()):
        raise RowProblem(f"{field}.{next(iter(thoughts))}", "no thinking in a turn that is not the assistant's")
    mark = _mark(message, field)
    if turn["role"] == "assistant" and mark is not None:
        turn["weight"] = mark
    elif mark:
        remarks.notes[OTHERS_MARKED] = None
    return [*results, turn]


def _result(block: Turn, field: str, remarks: Remarks) -> Turn:
    """The turn for a part with a tool's result, as in Anthropic's form."""
    remarks.look(block, {"type", "tool_use_id", "name", "content"}, REFUSED_IN_PARTS, f"{field}.")
    keys = {"tool_use_id": "tool_call_id", "name": "name"}
    named = {keys[key]: block[key] for key in keys if isinstance(block.get(key), str)}
    content, where = block.get("content") or "", f"{field}.content"
    if isinstance(content, list) and any(map(_is_file, content)):
        _refuse_other_parts(content, where)
    return {"role": "tool", **named, **content_of(content, where, "tool", False, remarks)}


def _refuse_other_parts(value: Any, field: str) -> None:
    """Refuse parts in forms that are not read: otherwise the JSON of such a part would be learnt."""
    for number, part in enumerate(value if isinstance(value, list) else [value]):
        given = {name: held for name, held in part.items() if held is not None} if isinstance(part, dict) else {}
        others = [name for name in given if name in _OTHERS_PARTS and isinstance(given[name], dict)]
        others += [name for name in _FILES if _is_file(given.get(name))]
        others += [name for name in _FILES[1:] if isinstance(given.get(name), dict) and _IN_FILES & given[name].keys()]
        if _is_file(given) and given.get("type") not in _IMAGES:
            others.append("source")
        beside = [name for name in given if name not in ("text", "image")]
        is_part = isinstance(value, list) or {*beside} <= {"thought", "thoughtSignature", "thought_signature", *_MARKS}
        if is_part and "type" not in given and len(given) > 1 and len(beside) < len(given):
            others += beside or ["image"]
        if others:
            raise _no_part(f"{field}[{number}]", others[0])


def _is_file(value: Any) -> bool:
    source = value.get("source") if isinstance(value, dict) else None
    return isinstance(source, dict) and not source.keys().isdisjoint(_IN_FILES)


def _no_part(field: str, held: Any) -> RowProblem:
    refusal = RowRefused if held in {*_OTHERS_PARTS, *_MARKS} else RowProblem
    return refusal(field, f"a part of type text or image, not {kind(held)}; give JSON as a text")


def _divided(value: Any, role: str, field: str) -> tuple[dict[str, list[Turn]], Any]:
    """The parts of a content that are thinking, tool calls or tool results, by type, and the content without these."""
    if not isinstance(value, list):
        return {kind: [] for kind in _ORDER}, value
    types = {"assistant": ("thinking", "tool_use"), "user": ("tool_result",), "tool": ("tool_result",)}.get(role, ())
    kinds = [part["type"] if isinstance(part, dict) and part.get("type") in types else "" for part in value]
    order = [_ORDER[kind] for kind in kinds]
    if order != sorted(order):
        raise RowProblem(field, "thinking or tool results first, then text, then tool calls, got a different order")
    blocks = {kind: [part for part, its in zip(value, kinds, strict=True) if its == kind] for kind in _ORDER}
    rest = blocks.pop("")
    return blocks, (rest or None) if any(kinds) else value


def _calling(message: Turn, role: str, field: str) -> str:
    """The key with a message's tool calls; "" if there are none."""
    keys = [which for which in ("tool_calls", "function_call") if message.get(which)]
    if keys and role != "assistant":
        raise RowProblem(f"{field}.{keys[0]}", f"no tool call in a turn of the {role}: only the assistant calls tools")
    if len(keys) > 1:
        raise RowProblem(f"{field}.function_call", "tool calls in function_call or in tool_calls, not in both")
    return keys[0] if keys else ""


def content_of(value: Any, field: str, role: str, called: bool, remarks: Remarks) -> Turn:
    """A message's `content` and, if it has images, its `images`."""
    if isinstance(value, str):
        return {"content": value}
    if called and (value is None or value == []):
        return {"content": ""}
    types = (*_TEXTS, *_IMAGES)
    if isinstance(value, dict) and value.get("type") in types:
        value = [value]
    parts = [_typed(part) for part in value] if isinstance(value, list) else []
    if role == "tool" and value is not None and not (parts and all(part and part["type"] in types for part in parts)):
        return {"content": as_json(value)}
    if value == []:
        raise RowProblem(field, f"text, got {kind(value)}")
    if not any(parts):
        return {"content": text_of(value, field, remarks)}
    images = [part["type"] in _IMAGES for part in parts if part]
    texts, paths = [], []
    for number, part in enumerate(parts):
        where = f"{field}[{number}]"
        if part and part["type"] in _IMAGES:
            _look_at_part(part, {"type", *_PATHS}, where, remarks)
            paths.append(_path(_addressed(part), where))
            texts.append(IMAGE)
        elif part and part["type"] in _TEXTS and isinstance(part.get("text"), str):
            _look_at_part(part, {"type", "text"}, where, remarks)
            if any(images) and IMAGE in part["text"]:
                raise RowProblem(f"{where}.text", f"a text without {IMAGE}, because images are parts here")
            texts.append(part["text"])
        else:
            held = (
                part["type"] if part else next(iter(value[number]), None) if isinstance(value[number], dict) else None
            )
            raise _no_part(where, held)
    return {"content": "".join(texts), **({"images": paths} if paths else {})}


def _look_at_part(part: Turn, read: set[str], where: str, remarks: Remarks) -> None:
    """Report unread keys of a part of a turn, and refuse a mark that would exclude only this part from the loss."""
    remarks.look(part, {*read, *_MARKS}, REFUSED_IN_PARTS, f"{where}.")
    if marked := next((name for name in _MARKS if part.get(name) not in (None, True, 1)), None):
        raise RowRefused(f"{where}.{marked}", REFUSED_IN_TURNS["train_detail"])


def _typed(part: Any) -> Turn | None:
    """A part of a content, with its type, which Qwen's form leaves out; None if `part` is something else."""
    if not isinstance(part, dict):
        return None
    if isinstance(part.get("type"), str):
        return part
    held = [name for name, value in part.items() if value is not None]
    return {**part, "type": held[0]} if held in (["text"], ["image"]) else None


def _addressed(part: Turn) -> Turn:
    """An image's part; if Anthropic's `source` has the address, the address is also under OpenAI's key `url`."""
    source = part.get("source")
    if not isinstance(source, dict):
        return part
    encoded = f"data:{source.get('media_type')};base64,{source['data']}" if source.get("data") else source.get("url")
    return {**part, "url": encoded}


def image_address(image: Any) -> Any:
    """An image's path or address. If it has bytes, which `read_rows` gives as {"base64": ...}, they become a data:
    address, even if there is a path too."""
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


def read_calls(value: Any, field: str, remarks: Remarks) -> list[Turn]:
    """Tool calls in OpenAI's form. The arguments become an object, also if the row has them as JSON text."""
    calls = []
    for number, call in enumerate(value if isinstance(value, list) else [value]):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem(f"{field}[{number}]", f"a call with a name and arguments, got {kind(call)}")
        for keys in (call, function):
            _look_at_part(keys, _IN_CALLS, f"{field}[{number}]", remarks)
        arguments = next((function[name] for name in _ARGUMENTS if function.get(name) is not None), None)
        where = f"{field}[{number}].arguments"
        arguments = {} if arguments in (None, "") else _json(arguments, where)
        if not isinstance(arguments, dict):
            raise RowProblem(where, f"an object, or its JSON text, got {kind(arguments)}")
        named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append({"type": "function", **named, "function": {"name": function["name"], "arguments": arguments}})
    if not calls:
        raise RowProblem(field, "at least one call, got none")
    return calls


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise RowProblem(field, f"text, got {kind(value)}")
    return value


def _mark(message: Turn, field: str) -> int | None:
    """Whether a turn is learnt: OpenAI's `weight`, Axolotl's `train` or ms-swift's `loss`; None without these."""
    marks = {name: message[name] for name in _MARKS if message.get(name) is not None}
    for name, mark in marks.items():
        if not isinstance(mark, (bool, int, float)) or mark not in (0, 1):
            got = mark if isinstance(mark, (int, float)) else kind(mark)
            raise RowProblem(f"{field}.{name}", f"0 or 1, false or true (a turn is learnt or not), got {got}")
        if mark != (first := next(iter(marks.values()))):
            raise RowProblem(f"{field}.{name}", f"the same as {next(iter(marks))} {first}, got {mark}")
    return next(map(int, marks.values()), None)
