"""The command `export-data`: writes a task's rows as chat files, for other trainers."""

import json
from pathlib import Path
from typing import Any

import click

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import Conversation, conversation, read_split
from accel_sft.commands.trained import one_process
from accel_sft.io import terminal
from accel_sft.io.files import new_folder
from accel_sft.io.text import printable
from accel_sft.rows.rows import example_name

SPLITS = ("train", "validation")


def command(name: str, task: Task, config: TrainConfig) -> None:
    """Write the rows into the folder that the command line names."""
    run(task, click.get_current_context().params["out"])


def run(task: Task, out: str) -> None:
    """Write train.jsonl and validation.jsonl into the new folder `out`, and print the number of rows.

    The folder appears only when it is complete.
    """
    if problems := one_process("export-data"):
        raise UserError(*problems)
    with new_folder(out, "OUT") as partial:
        counts = {split: _write(task, split, partial / f"{split}.jsonl") for split in SPLITS}
    for split, rows in counts.items():
        print(f"{Path(out) / split}.jsonl: {rows:,} rows", file=terminal.terminal())


def chat_row(chat: Conversation) -> dict[str, Any]:
    """Return a conversation or raw text as a row of a chat file; an assistant's turn without loss has `"weight": 0`."""
    beside = {"tools": chat.tools, "chat_template_kwargs": chat.variables}
    beside = {name: value for name, value in beside.items() if value}
    if not chat.turns:
        return {"text": chat.target}
    answers = {"chosen": chat.answer, "rejected": chat.rejected} if chat.rejected else {"completion": chat.answer}
    if chat.continued:
        prompt, texts = chat.turns[0]["content"], {name: turn["content"] for name, turn in answers.items()}
        return {"prompt": prompt, **texts, **beside}
    if chat.rejected:
        return {"prompt": chat.turns, **{name: [turn] for name, turn in answers.items()}, **beside}
    learnt = {*chat.learnt, len(chat.turns)}
    messages = [
        {**turn, "weight": 0} if turn["role"] == "assistant" and at not in learnt else turn
        for at, turn in enumerate((*chat.turns, chat.answer))
    ]
    return {"messages": messages, **beside}


def _write(task: Task, split: str, path: Path) -> int:
    examples = read_split(task, split)
    for note in getattr(examples, "notes", ()):
        print(terminal.wrapped(printable(str(note))), file=terminal.terminal())
    with path.open("w", encoding="utf-8") as file:
        for index in range(len(examples)):
            chat = conversation(task, examples, split, index)
            if chat.images:
                raise UserError(f"{example_name(examples, split, index)}: has images, which export-data cannot write")
            file.write(json.dumps(chat_row(chat), ensure_ascii=False) + "\n")
    return len(examples)
