"""Recognizes the form of a row by its columns: chat messages, prompt and completion, Alpaca, or raw text.

Columns that the form does not read are refused or reported: keys.py decides which.
"""

from __future__ import annotations

import contextlib
import functools
import mimetypes
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from accel_sft import RowLeftOut, RowProblem
from accel_sft_chat.images import with_images
from accel_sft_chat.keys import AS_JSON, SWITCHES, Remarks, RowRefused, is_empty, refused_in
from accel_sft_chat.messages import IN_PROMPT, Turn, content_of, read_turns
from accel_sft_chat.turns import JOINED
from accel_sft_chat.values import json_in, kind, text_of

COLUMNS = {
    "messages": ("messages", "conversations", "conversation", "dialogue", "dialog", "contents"),
    "prompt": ("prompt",),
    "completion": ("completion",),
    "instruction": ("instruction", "question"),
    "input": ("input", "context"),
    "output": ("output", "response"),
    "chosen": ("chosen", "chosen_response", "preferred_output"),
    "rejected": ("rejected", "rejected_response", "rejected_messages", "non_preferred_output"),
    "history": ("history",),
    "system": ("system", "system_prompt"),
    "tools": ("tools", "functions"),
    "images": ("images", "image"),
    "text": ("text",),
}
"""Names by which the column of each kind is recognized; `--columns` names a different column for a kind."""
RAW_TEXT = "raw text"
ONE_SIDED = "one of two answers, chosen or rejected, is missing or empty"
RENDERED = re.compile(
    r"<\|im_start\|>|<\|start_header_id\|>|<start_of_turn>|<\|start\|>|\[INST\]|<\|(user|assistant)\|>|<｜(User|Assistant)｜>"
    r"|^### ?(Human|User|Instruction|Assistant|Response):|^USER: .*ASSISTANT: |^Human: (?s:.{,4000}?)\n\nAssistant:",
    re.MULTILINE,
)
"""Marks that chat templates write around turns, and those of Anthropic's hh-rlhf."""
_LISTS = ("conversation", "dialogue", "dialog", "contents")
"""Columns with these names have messages only if they hold a list: some data sets have a text in them."""
_VARIABLES = "chat_template_kwargs"
_FORMS = (("messages",), ("prompt", "completion"), ("instruction", "output"), ("text",))
_SAID = ("content", "tool_calls", "function_call")
_LABELS = ("label", "labels", "sentiment", "intent")
_NO_RAW_TEXT = (*_LABELS, "role", "parent_id", "image", "images", "file_name")
"""Columns (labels, trees, captions) beside which a text is not raw text, unless --columns names the text's column."""
_TOOLS_IN_TEXT = re.compile(r"<tools>(.*?)</tools>", re.DOTALL)
_NAME_OF_TOOL = re.compile(r"""["']name["']\s*:\s*["']([^"']+)["']""")
_REPR = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
"""How a list of messages begins in a table that pandas or numpy wrote."""
_SHOWN = 8


class RowTurns(NamedTuple):
    """The content of a row.

    Attributes:
        form: the row's form in words, with the names of its columns; begins with RAW_TEXT for raw text (a single turn).
        turns: the row's turns, unchanged.
        system_text: the text of the row's system column, or "".
        tools: the schemas of the row's tools.
        notes: what was done to the row, and which columns of `--columns` it lacks.
        unread: names of the row's keys that are not read.
        variables: variables that the row sets in the chat template.
        rejected: a worse answer than the last turn, which is then the only one to learn; None without any.
    """

    form: str
    turns: list[Turn]
    system_text: str
    tools: list[dict[str, Any]] | None
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    variables: dict[str, Any] | None = None
    rejected: list[Turn] | None = None


def named_columns(text: str | None) -> tuple[tuple[str, str], ...]:
    """Parse `--columns` into pairs: what a column holds, and the column's name.

    Raises:
        ValueError: the text is malformed; the message says how, in a phrase.
    """
    pairs = []
    for part in (text or "").split(",") if text else ():
        what, _, column = (word.strip() for word in part.partition("="))
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
        RowProblem: a field does not hold what it should.
        RowRefused: the form is unknown, or a column says what to learn in a way that this task does not support.
        RowLeftOut: the form is unknown, and one of two answers is missing.
    """
    named, remarks, given = dict(columns), Remarks(), row
    row = row if columns else unwrapped(row)
    if "" in row:  # _recognised returns "" for an absent column
        remarks.look({"": row[""]}, (), {})
        row = {key: value for key, value in row.items() if key}
    column, forms = recognised(row, columns)
    form = next((form for form in forms if row[column(form[0])] is not None), None)
    if form is None:
        if not forms and (column("chosen") or column("rejected")) and {*named.values()} <= row.keys():
            raise RowLeftOut(ONE_SIDED)
        raise _unknown(row, named.values(), has_form=bool(forms))
    first = column(form[0])
    others = [column(what) for what in ("system", "tools", "images")]
    if form[0] == "text":
        for name in () if "text" in named else _NO_RAW_TEXT:
            is_other_file = name == "file_name" and not _names_image(row.get(name))
            if not (is_empty(row.get(name)) or is_other_file):
                learn = f"to learn it, use --columns prompt={first},completion={name}; " if name in _LABELS else ""
                texts = f"to learn only the texts, use --columns text={first}"
                raise RowRefused(name, f"no {name} beside raw text; {learn}{texts}")
        refused = refused_in(row)
        for name in ("label", *SWITCHES):  # here a text's label judges no answer, and switches belong to prompts
            refused.pop(name, None)
        remarks.look(row, {first}, refused)
        turns = [{"role": "assistant", "content": _text(row, first, remarks, needed=True)}]
        return RowTurns(f"{RAW_TEXT} (column {first})", turns, "", None, tuple(remarks.notes), tuple(remarks.unread))
    system_text, tools = _system(row, others[0], remarks), _tools(row, others[1])
    read = {first, *others, _VARIABLES}
    if form[0] == "messages":
        pairs = _turns_of_pairs(row[first])
        turns, is_sharegpt = read_turns(pairs or row[first], first, remarks)
        held = first if first in given else "body" if "body" in given else "query, answers"
        names = "input, output" if pairs else "role, content"
        form = f"ShareGPT (column {held}: from, value)" if is_sharegpt else f"messages (column {held}: {names})"
    else:
        second, earlier = column(form[1]), column("history")
        read |= {second, earlier}
        if number := _rows_in(row[first], row[second]):
            expected = f"one text, got {number} here and in {second}; write a row for each, as JSON Lines"
            raise RowRefused(first, expected)
        if form[0] == "prompt":
            past = [{**turn, IN_PROMPT: True} for turn in _history(row, earlier, remarks)]
            turns = [*past, *_pair(row, first, second, remarks)]
            form = f"prompt and completion (columns {first}, {second})"
        else:
            read.add(more := column("input"))
            questions = [_text(row, name, remarks) for name in (first, more)]
            question = {"role": "user", "content": "\n".join(part for part in questions if part.strip())}
            answer = {"role": "assistant", "content": _text(row, second, remarks, needed=True)}
            turns = [*_history(row, earlier, remarks), question, answer]
            form = f"Alpaca (columns {first}, {more or 'input'}, {second})"
    remarks.look(row, read, refused_in(row))
    if tools and _stand_in(system_text, turns, tools):
        tools = None
        remarks.notes[f"with tools in <tools> of the system prompt: the column {others[1]} is left out"] = None
    turns, notes = with_images(turns, row.get(others[2]), others[2], folder)
    missing = (f"without the column {name}, which --columns names" for name in named.values() if name not in row)
    if system_text and others[0] not in ("system", *named.values()):
        form = f"{form[:-1]}; system prompt in {others[0]})"
    all_notes = (*missing, *remarks.notes, *notes)
    return RowTurns(form, turns, system_text, tools, all_notes, tuple(remarks.unread), _variables(row))


def unwrapped(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with `messages`, from OpenAI's requests or preferences or made of xLAM's query and calls; else the row."""
    outer = "input" if "preferred_output" in row else "body"
    body = row.get(outer)
    if isinstance(body, dict) and "messages" in body and "messages" not in row:
        return {**{key: value for key, value in row.items() if key != outer}, **body}
    if row.keys() >= {"query", "answers", "tools"} and "messages" not in row:
        answer = {"role": "assistant", "content": None, "tool_calls": row["answers"]}
        rest = {key: value for key, value in row.items() if key not in ("query", "answers")}
        return {"messages": [{"role": "user", "content": row["query"]}, answer], **rest}
    return row


def recognised(row: Mapping[str, Any], columns: tuple[tuple[str, str], ...]) -> tuple[Callable[[str], str], list[Any]]:
    """The column of each kind in a row ("" if there is none), and the forms that the row may have."""
    keys = tuple(key for key, value in row.items() if key not in _LISTS or isinstance(value, list))
    return _recognised(keys, tuple(key for key in keys if not is_empty(row[key])), columns)


@functools.lru_cache(64)  # most files have few sets of columns
def _recognised(
    row: tuple[str, ...], filled: tuple[str, ...], columns: tuple[tuple[str, str], ...]
) -> tuple[Callable[[str], str], list[tuple[str, ...]]]:
    """For rows with these columns: the column of each kind ("" if there is none), and the forms that the rows may have.

    Args:
        filled: the columns whose value is neither null nor empty; they come before empty columns of the same kind.
    """
    named = dict(columns)
    kinds = {what: (named[what],) if what in named else names for what, names in COLUMNS.items()}
    column_of = {
        what: next((name for held in (filled, row) for name in names if name in held), "")
        for what, names in kinds.items()
    }
    # if columns were named, only forms with these columns are considered
    forms = [form for form in _FORMS if not named.keys().isdisjoint(form)] or _FORMS
    return column_of.__getitem__, [form for form in forms if all(column_of[what] for what in form)]


def _unknown(row: Mapping[str, Any], named: Iterable[str], *, has_form: bool) -> RowProblem:
    """The problem of a row that no form fits. `has_form`: its columns do fit a form, but have no value."""
    there = ", ".join(key[:80] + " (null)" * (row[key] is None) for key in list(row)[:_SHOWN]) or "none"
    if absent := [name for name in named if name not in row]:
        return RowRefused(None, f"a column {' and '.join(absent)}, which --columns names, got {there}")
    return (RowProblem if has_form else RowRefused)(
        None,
        "columns messages or conversations, prompt and completion, instruction and output, or text, "
        f"got {there}; name other columns: --columns prompt=question,completion=answer",
    )


def _names_image(value: Any) -> bool:
    return (mimetypes.guess_type(str(value))[0] or "").startswith("image/")


def _text(row: Mapping[str, Any], column: str, remarks: Remarks, *, needed: bool = False) -> str:
    """A column's text. Without a value: "", or RowProblem if the text is `needed`."""
    value = row.get(column)
    if isinstance(value, str) and _REPR.match(value):
        raise RowRefused(column, "JSON of messages, got Python's repr of them: write them with json.dumps or to_json")
    return "" if value is None and not needed else text_of(value, column, remarks)


def _system(row: Mapping[str, Any], column: str, remarks: Remarks) -> str:
    """The system prompt in a column: a text, a message, a part (Anthropic's form), or a list of such values."""
    value = row.get(column)
    if not value:
        return ""
    held = messages_in(value) or (value if isinstance(value, list) else [value])
    if all(isinstance(text, str) for text in held):
        texts = held
    elif all(map(_is_message, held)):
        turns = read_turns(held, column, remarks)[0]
        if other := next((turn["role"] for turn in turns if turn["role"] != "system"), None):
            raise RowProblem(column, f"a system prompt, got a turn of the {other}")
        texts = [turn["content"] for turn in turns]
    else:
        texts = [content_of(held, column, "system", False, parts := Remarks())["content"]]
        if AS_JSON in parts.notes:
            raise RowProblem(column, f"a system prompt: text, a message or parts, got {kind(value)}")
        remarks.unread |= parts.unread
    if len(texts) > 1:
        remarks.notes[JOINED.format("system")] = None
    return "\n\n".join(texts)


def _rows_in(*columns: Any) -> int:
    """How many rows a row holds, if each of its columns is a list of the same number of texts; 0 for any other row."""
    if not all(isinstance(column, list) and all(isinstance(text, str) for text in column) for column in columns):
        return 0
    return len(columns[0]) if len(set(map(len, columns))) == 1 else 0


def _pair(row: Mapping[str, Any], prompt: str, completion: str, remarks: Remarks) -> list[Turn]:
    """The turns of a prompt and a completion, each a text or a list of messages; turns of the prompt are not learnt."""
    prompt_turns, answer_turns = messages_in(row[prompt]), messages_in(row[completion])
    turns = (
        read_turns(prompt_turns, prompt, remarks)[0]
        if prompt_turns
        else [{"role": "user", "content": _text(row, prompt, remarks, needed=True)}]
    )
    for turn in turns:
        turn[IN_PROMPT] = True
    if answer_turns:
        answered = read_turns(answer_turns, completion, remarks)[0]
    else:
        answered = [{"role": "assistant", "content": _text(row, completion, remarks, needed=True)}]
    if turns[-1]["role"] == answered[0]["role"] == "assistant":
        expected = f"no assistant turn at its end; put the whole answer into {completion}"
        raise RowProblem(prompt, expected)
    if not prompt_turns and not answer_turns:
        turns[0]["continued"] = True
    return [*turns, *answered]


def _history(row: Mapping[str, Any], column: str, remarks: Remarks) -> list[Turn]:
    """Earlier turns: from a list of pairs (question, answer), a list of messages, or the JSON text of such a list."""
    pairs, turns = row.get(column), []
    if isinstance(pairs, str):
        try:
            pairs = json_in(pairs) if pairs.strip() else None
        except ValueError as error:
            raise RowProblem(column, f"JSON of a list of pairs, [[question, answer], ...] ({error})") from None
    if pairs and isinstance(pairs, list) and all(map(_is_message, pairs)):
        return read_turns(pairs, column, remarks)[0]
    for number, pair in enumerate(pairs if isinstance(pairs, list) else [pairs] if pairs else []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise RowProblem(f"{column}[{number}]", f"[question, answer], two texts, got {kind(pair)}")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return turns


def _turns_of_pairs(value: Any) -> list[Turn]:
    """The messages of a list of pairs of input and output, as in Capybara; [] if `value` is not such a list."""
    if not isinstance(value, list) or not all(
        isinstance(pair, dict) and {*pair} == {"input", "output"} for pair in value
    ):
        return []
    roles = {"input": "user", "output": "assistant"}
    return [{"role": role, "content": pair[name]} for pair in value for name, role in roles.items()]


def messages_in(value: Any) -> list[Any] | None:
    """The messages in a list, in one message, or in a list's JSON text (as in a CSV cell); None if `value` is a text.

    A list of other values (or its JSON text) counts as a text: data that the model is to read or to answer with.
    """
    if isinstance(value, str):
        parsed = None
        with contextlib.suppress(ValueError):
            parsed = json_in(value) if value.lstrip()[:1] == "[" else None
        return parsed if isinstance(parsed, list) and parsed and all(map(_is_message, parsed)) else None
    listed = [message for message in (value if isinstance(value, list) else [value]) if isinstance(message, dict)]
    meant = any(_is_message(message) or message.get("role") in ("user", "assistant", "system") for message in listed)
    return (value if isinstance(value, list) else listed) if meant else None


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return value.keys() >= {"from", "value"} or ("role" in value and not value.keys().isdisjoint(_SAID))


def _tools(row: Mapping[str, Any], column: str) -> list[dict[str, Any]] | None:
    """The schemas of tools: from a list of schemas or JSON texts, or from a list's JSON text; None without any."""
    value = row.get(column)
    if isinstance(value, str):
        try:
            value = json_in(value) if value.strip() else None
        except ValueError as error:
            raise RowProblem(column, f"JSON of a list of tools ({error})") from None
    if not value:
        return None
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        if isinstance(tool, str):
            with contextlib.suppress(ValueError):  # refused below
                tool = json_in(tool)
        tools.append(tool)
    for number, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowProblem(f"{column}[{number}]", f"a tool's schema, an object with a name, got {kind(tool)}")
    return [tool if "function" in tool else {"type": "function", "function": _schema(tool)} for tool in tools]


def _stand_in(system_text: str, turns: list[Turn], tools: list[dict[str, Any]]) -> bool:
    """Whether system prompts already have the schemas, as in Hermes' data: all tools are named within <tools>."""
    texts = [system_text, *(turn["content"] for turn in turns if turn["role"] == "system")]
    schemas = [schema for text in texts for schema in _TOOLS_IN_TEXT.findall(text)]
    return {tool["function"]["name"] for tool in tools} <= {*_NAME_OF_TOOL.findall("".join(schemas))}


def _schema(tool: dict[str, Any]) -> dict[str, Any]:
    """A flat schema of a tool, such as Anthropic's or MCP's, with its parameters under OpenAI's key."""
    named = {"input_schema": "parameters", "inputSchema": "parameters"}
    return {named.get(name, name): value for name, value in tool.items() if (name, value) != ("type", "function")}


def _variables(row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Variables that the row sets in the chat template: TRL's `chat_template_kwargs`, an object or its JSON text."""
    value = row.get(_VARIABLES)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = json_in(value) if value.strip() else None
    if value is not None and not isinstance(value, dict):
        raise RowProblem(_VARIABLES, f"an object, or its JSON text, got {kind(value)}")
    for name, held in (value or {}).items():
        as_text = isinstance(held, str) and held.strip().lower() in ("true", "false")  # any text is true in a template
        if as_text or (name.startswith("enable_") and not isinstance(held, (bool, type(None)))):
            raise RowProblem(f"{_VARIABLES}.{name}", f"true or false as JSON, not a text or number, got {held!r:.40}")
    variables = {name: held for name, held in (value or {}).items() if held is not None}
    return variables or None
