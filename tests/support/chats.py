"""Makes chats in the forms in which they are published."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Turns = list[tuple[str, str]]
_SHAREGPT = {"user": "human", "assistant": "gpt", "system": "system"}


def jsonl(path: Path, rows: Iterable[object]) -> str:
    """Writes rows into a JSONL file, and returns its name."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(number: int, draw: random.Random) -> Turns:
    """One chat about sums, with OpenAI's roles."""
    first, second = draw.randrange(10, 100), draw.randrange(10, 100)
    turns = [("user", f"{number}: what is {first} + {second}?"), ("assistant", f"It is {first + second}.")]
    if number % 3 == 0:
        turns += [("user", "And one more?"), ("assistant", f"Then {first + second + 1}.")]
    if number % 4 == 0:
        turns.insert(0, ("system", "You add numbers."))
    return turns


def as_messages(turns: Turns) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def as_sharegpt(turns: Turns) -> dict[str, Any]:
    conversations = [{"from": _SHAREGPT[role], "value": text} for role, text in turns]
    return {"id": len(turns), "conversations": conversations}


def as_alpaca(turns: Turns) -> dict[str, Any]:
    """The last question and answer, and earlier ones as history; a question with ": " becomes instruction and input."""
    *earlier, question, answer = [text for role, text in turns if role != "system"]
    instruction, _, given = question.partition(": ")
    history = [earlier[at : at + 2] for at in range(0, len(earlier), 2)]
    return {"instruction": instruction, "input": given, "output": answer, "system": "", "history": history}


def as_pair(turns: Turns) -> dict[str, Any]:
    """Prompt and completion: texts if the chat is one question and answer, else lists of messages."""
    if len(turns) == 2:
        return {"prompt": turns[0][1], "completion": turns[1][1]}
    messages = as_messages(turns)["messages"]
    return {"prompt": messages[:-1], "completion": messages[-1:]}


FORMS: dict[str, Callable[[Turns], dict[str, Any]]] = {
    "messages": as_messages,
    "sharegpt": as_sharegpt,
    "alpaca": as_alpaca,
    "pairs": as_pair,
}
