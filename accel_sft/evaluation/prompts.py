"""Reads a file of prompts that belong to no task: one per line of text, or rows with messages or a prompt."""

from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Turns
from accel_sft.evaluation.answerer import expected_of
from accel_sft.rows.json_stream import RowProblem
from accel_sft.rows.rows import read_rows


def read_prompts(file: str, system: str | None) -> tuple[list[Turns], list[str]]:
    """The conversations of a file, and where each stands in it.

    A `.json` or `.jsonl` file has rows with `messages`, a conversation whose last turn is to be answered, or `prompt`,
    text. Any other file has a prompt on each line that is not blank.

    Args:
        system: the system message of conversations that have none of their own.
    Raises:
        UserError: the file cannot be read, or has rows of another form; the error names the first by line.
    """
    if Path(file).suffix in (".json", ".jsonl"):
        rows = read_rows(file, _parse)
        return [with_system(row, system) for row in rows], [str(place) for place in rows.places(range(len(rows)))]
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--file {file}: cannot be read ({cause}); name a file of prompts") from None
    asked = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not asked:
        raise UserError(f"--file {file}: no prompt in it; write one on each line")
    chats = [with_system([{"role": "user", "content": line}], system) for _, line in asked]
    return chats, [f"{file}:{number}" for number, _ in asked]


def with_system(turns: Turns, system: str | None) -> Turns:
    """The turns, after the system message `system` if it is not empty and they have none of their own."""
    if not system or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _parse(row: dict[str, Any]) -> Turns:
    if "messages" in row:
        if expected := expected_of(row["messages"]):
            raise RowProblem("messages", expected)
        return [{"role": turn["role"], "content": turn["content"]} for turn in row["messages"]]
    if not isinstance(row.get("prompt"), str):
        raise RowProblem("prompt", "text, or `messages` instead")
    return [{"role": "user", "content": row["prompt"]}]
