"""Writes chat files in the forms in which they are published; every fifteenth row has a blemish of such files."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Turns = list[tuple[str, str]]
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CITIES = ("Paris", "Zürich", "北京", "Nairobi", "Lima")
_SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation", "calls": "function_call"}
BLEMISHES = (
    "two user turns in a row",
    "a leading assistant turn",
    "a user turn at the end",
    "tool turns",
    "no assistant turn",
    "an empty assistant turn",
    "an empty system turn",
    "two assistant turns in a row",
)


def jsonl(path: Path, rows: Iterable[object]) -> str:
    """Writes rows into a JSONL file, and returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(number: int, draw: random.Random, blemish: str = "") -> Turns:
    """One chat about sums, with OpenAI's roles, and the role `calls` for a tool call, whose text is JSON."""
    first, second = draw.randrange(10, 100), draw.randrange(10, 100)
    turns = [("user", f"{number}: what is {first} + {second}?"), ("assistant", f"It is {first + second}.")]
    if number % 3 == 0:
        turns += [("user", "And one more?"), ("assistant", f"Then {first + second + 1}.")]
    if number % 4 == 0:
        turns.insert(0, ("system", "You add numbers."))
    city = draw.choice(CITIES)
    call = json.dumps({"name": "weather", "arguments": {"city": city}}, ensure_ascii=False)
    return {
        "": turns,
        "two user turns in a row": [("user", "Hello."), *(turn for turn in turns if turn[0] != "system")],
        "a leading assistant turn": [("assistant", "How can I help?"), *(t for t in turns if t[0] != "system")],
        "a user turn at the end": [*turns, ("user", "Thanks!")],
        "tool turns": [
            ("user", f"{number}: how is the weather in {city}?"),
            ("calls", call),
            ("tool", '{"degrees": 21}'),
            ("assistant", f"It is 21 degrees in {city}."),
        ],
        "no assistant turn": turns[:1],
        "an empty assistant turn": [*turns, ("user", "And?"), ("assistant", "")],
        "an empty system turn": [("system", ""), *(turn for turn in turns if turn[0] != "system")],
        "two assistant turns in a row": [*turns, ("assistant", "Anything else?")],
    }[blemish]


def as_messages(turns: Turns) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for role, text in turns:
        if role == "calls":
            call = json.loads(text)
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            calls = [{"id": "call_1", "type": "function", "function": function}]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        else:
            messages.append({"role": role, "content": text, **({"tool_call_id": "call_1"} if role == "tool" else {})})
    tools = [{"type": "function", "function": WEATHER}]
    return {"messages": messages, **({"tools": tools} if any(role == "tool" for role, _ in turns) else {})}


def as_sharegpt(turns: Turns) -> dict[str, Any]:
    row: dict[str, Any] = {"id": len(turns)}
    row["conversations"] = [{"from": _SHAREGPT[role], "value": text} for role, text in turns]
    return {**row, "tools": json.dumps([WEATHER])} if any(role == "tool" for role, _ in turns) else row


def as_alpaca(turns: Turns) -> dict[str, Any]:
    """The last question and answer, and earlier ones as history; a question with ": " becomes instruction and input."""
    texts = [text for role, text in turns if role in ("user", "assistant")]
    asked, answer = texts[-2:] if len(texts) % 2 == 0 else [texts[-1], ""]
    instruction, _, given = asked.partition(": ")
    row = {"instruction": instruction, "input": given, "output": answer} if given else {"instruction": asked}
    if len(texts) > 3:
        row["history"] = [texts[at : at + 2] for at in range(0, len(texts) - 3, 2)]
    return {"input": "", "output": answer, "system": "", **row}


def as_pair(turns: Turns) -> dict[str, Any]:
    """Prompt and completion: texts if the chat is one question and answer, else lists of messages."""
    if [role for role, _ in turns] == ["user", "assistant"]:
        return {"prompt": turns[0][1], "completion": turns[1][1]}
    row = as_messages(turns)
    messages = row.pop("messages")
    last = max((at for at, turn in enumerate(messages) if turn["role"] == "assistant"), default=len(messages) - 1)
    return {**row, "prompt": messages[:last], "completion": messages[last:]}


FORMS: dict[str, Callable[[Turns], dict[str, Any]]] = {
    "messages": as_messages,
    "sharegpt": as_sharegpt,
    "alpaca": as_alpaca,
    "pairs": as_pair,
}


def rows(form: str, count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of a form; every 15th has a blemish, and a few occur twice."""
    draw, made = random.Random(seed), []
    blemishes = BLEMISHES
    if form == "alpaca":  # Alpaca has no roles
        blemishes = ("a user turn at the end", "an empty assistant turn")
    elif form == "pairs":  # these rows end with the completion
        blemishes = ("two user turns in a row", "a leading assistant turn", "tool turns", "an empty system turn")
    for number in range(count):
        blemish = blemishes[number // 15 % len(blemishes)] if number % 15 == 7 else ""
        made.append(FORMS[form](chat(number, draw, blemish)))
        if number % 100 == 50:
            made[-1] = made[-2]
    return made


def write(folder: Path, count: int = 1000) -> dict[str, Path]:
    """Write a file of each form, and some forms in other formats; returns the files by what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {form: folder / f"{form}.jsonl" for form in FORMS}
    for form, path in made.items():
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows(form, count)), "utf-8")
    made["alpaca as JSON"] = folder / "alpaca.json"
    made["alpaca as JSON"].write_text(json.dumps(rows("alpaca", count), indent=2, ensure_ascii=False), "utf-8")
    made["sharegpt, compressed"] = folder / "sharegpt.jsonl.gz"
    made["sharegpt, compressed"].write_bytes(gzip.compress(made["sharegpt"].read_bytes()))
    made["pairs as CSV"] = folder / "pairs.csv"
    with made["pairs as CSV"].open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["prompt", "completion"])
        writer.writerows(
            [row["prompt"], row["completion"]] for row in rows("pairs", count) if type(row["prompt"]) is str
        )
    made["messages as Parquet"] = folder / "messages.parquet"
    _write_parquet(made["messages as Parquet"], rows("messages", count))
    return made


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as `datasets` does: every message has all keys, null for those that it lacks."""
    import pyarrow
    from pyarrow import parquet

    rows = [{**row, "tools": json.dumps(row.get("tools"))} for row in rows]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
