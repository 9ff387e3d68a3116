"""The command `export-data`: writes a task's rows as chat files, for other trainers."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import Conversation, conversation, read_split
from accel_sft.chat.pictures import Picture, parted
from accel_sft.commands.trained import one_process
from accel_sft.io import terminal
from accel_sft.io.files import new_folder
from accel_sft.io.text import printable
from accel_sft.rows.rows import with_places

SPLITS = ("train", "validation")
IMAGES = "images"


def command(name: str, task: Task, config: TrainConfig) -> None:
    """Write the rows into the folder that the command line names."""
    run(task, click.get_current_context().params["out"])


def run(task: Task, out: str) -> None:
    """Write train.jsonl, validation.jsonl and the rows' images into the new folder `out`, and print the number of rows.

    The folder appears only when it is complete.

    Raises:
        UserError: training would refuse an example, or the folder cannot be written.
    """
    if problems := one_process("export-data"):
        raise UserError(*problems)
    with new_folder(out, "OUT") as partial:
        counts = {split: _write(task, split, partial / f"{split}.jsonl") for split in SPLITS}
    for split, rows in counts.items():
        print(f"{Path(out) / split}.jsonl: {rows:,} rows", file=terminal.terminal())


def chat_row(chat: Conversation, folder: Path) -> dict[str, Any]:
    """A conversation as a row of a chat file: its turns in order, and the schemas of its tools if it has any; or raw
    text.

    An assistant's turn that carries no loss has `"weight": 0`.

    Args:
        folder: gets the row's images in `images/`, each once, named by its hash; the row holds their relative paths.
    Raises:
        UserError: an image is not one that training accepts; a row may name any file of this machine as an image.
    """
    if not chat.turns:
        return {"text": chat.target}
    if chat.continued:
        return {"prompt": chat.turns[0]["content"], "completion": chat.target}
    paths = iter([_copied(picture, folder) for picture in chat.images])
    learnt = {*chat.learnt, len(chat.turns)}
    turns = (*(_with_images(turn, paths) for turn in parted(chat.turns, chat.images)), chat.answer)
    messages = [
        {**turn, "weight": 0} if turn["role"] == "assistant" and at not in learnt else turn
        for at, turn in enumerate(turns)
    ]
    beside = {"tools": chat.tools, "chat_template_kwargs": chat.variables}
    return {"messages": messages, **{name: value for name, value in beside.items() if value}}


def _with_images(turn: dict[str, Any], paths: Iterator[str]) -> dict[str, Any]:
    if not isinstance(turn["content"], list):
        return turn
    parts = [{**part, "image": next(paths)} if part["type"] == "image" else part for part in turn["content"]]
    return {**turn, "content": parts}


def _copied(picture: Picture, folder: Path) -> str:
    content, suffix = picture.file()
    path = Path(IMAGES, f"{hashlib.sha256(content).hexdigest()[:32]}{suffix}")
    if not (folder / path).exists():
        (folder / IMAGES).mkdir(exist_ok=True)
        (folder / path).write_bytes(content)
    return path.as_posix()


def _write(task: Task, split: str, path: Path) -> int:
    examples = read_split(task, split)
    for note in getattr(examples, "notes", ()):
        print(terminal.wrapped(printable(str(note))), file=terminal.terminal())
    with path.open("w", encoding="utf-8") as file:
        for index in range(len(examples)):
            chat = conversation(task, examples, split, index)
            try:
                row = chat_row(chat, path.parent)
            except UserError as error:
                lines = [f"{split} example {index}: {line}" for line in error.problems]
                raise UserError(*with_places(lines, examples, split)) from error
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return len(examples)
