"""The command `export-data`: a task's rows as chat files, for other trainers."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.commands.generate import one_process
from accel_sft.data.conversation import Conversation, conversation, read_split
from accel_sft.io import terminal
from accel_sft.io.files import new_folder
from accel_sft.io.text import printable

SPLITS = ("train", "validation")


def run(task: Task, out: str) -> None:
    """Write train.jsonl and validation.jsonl into `out`, a new folder, whole or not at all; print how many rows each
    has.

    Raises:
        UserError: an example that training would refuse, or a folder that cannot be written.
    """
    if problems := one_process("export-data"):
        raise UserError(*problems)
    with new_folder(out, "OUT") as partial:
        counts = {split: _write(task, split, partial / f"{split}.jsonl") for split in SPLITS}
    for split, rows in counts.items():
        print(f"{Path(out) / split}.jsonl: {rows:,} rows", file=terminal.terminal())


def chat_row(chat: Conversation) -> dict[str, Any]:
    """A conversation in the form of chat files: every turn in order, `"weight": 0` in those of an assistant that carry
    no loss, and schemas of tools if it has any."""
    messages = [
        {**turn, "weight": 0} if turn["role"] == "assistant" and at not in chat.learnt else turn
        for at, turn in enumerate(chat.turns)
    ]
    return {"messages": [*messages, chat.answer], **({"tools": chat.tools} if chat.tools else {})}


def _write(task: Task, split: str, path: Path) -> int:
    examples = read_split(task, split)
    for note in getattr(examples, "notes", ()):
        print(terminal.wrapped(printable(str(note))), file=terminal.terminal())
    with path.open("w", encoding="utf-8") as file:
        for row in _rows(task, examples, split):
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(examples)


def _rows(task: Task, examples: Sequence[Any], split: str) -> Iterator[dict[str, Any]]:
    for index in range(len(examples)):
        yield chat_row(conversation(task, examples, split, index))
