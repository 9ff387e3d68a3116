"""Reads prompts that belong to no task, with their images: one per line of text, rows with messages or a prompt, or
line by line in a conversation at the terminal."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Tools, Turns, checked_turns
from accel_sft.chat.pictures import Picture, parted
from accel_sft.evaluation.answerer import Answerer, expected_of
from accel_sft.io.terminal import wrapped
from accel_sft.io.text import printable
from accel_sft.rows.json_stream import RowProblem
from accel_sft.rows.rows import read_rows

_COLUMNS = ("images", "image")
_IMAGE = "<image>"


class Prompt(NamedTuple):
    """A conversation to be answered: turns whose contents are texts with a mark for each image, the images, and the
    schemas of tools."""

    turns: Turns
    images: tuple[Picture, ...] = ()
    tools: Tools = None

    def messages(self) -> Turns:
        """The turns as they are written to files: contents with images are lists of parts, with the images' paths."""
        turns, paths = parted(self.turns, self.images), iter([picture.given for picture in self.images])
        for part in (part for turn in turns if isinstance(turn["content"], list) for part in turn["content"]):
            if part["type"] == "image" and isinstance(path := next(paths), str):
                part["image"] = path
        return turns


def read_prompts(file: str, system: str | None) -> tuple[list[Prompt], list[str]]:
    """The conversations of a file, and where each stands in it.

    A `.json` or `.jsonl` file has rows with `messages`, a conversation whose last turn is to be answered, or `prompt`,
    text; beside them `tools`, and `system` for a conversation without a system message. Images are parts of a content,
    or in a column `images` or `image` beside `<image>` in the texts; relative paths begin at the file's folder. Any
    other file has a prompt on each line that is not blank. `system` is the system message of conversations without
    one.
    """
    if Path(file).suffix in (".json", ".jsonl"):
        rows = read_rows(file, _parse)
        names = [str(place) for place in rows.places(range(len(rows)))]
        folder = os.path.dirname(os.path.abspath(file))
        named_rows = zip(rows, names, strict=True)
        prompts = [_pictured(turns, images, folder, where, tools) for (turns, images, tools), where in named_rows]
        return [prompt._replace(turns=with_system(prompt.turns, system)) for prompt in prompts], names
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--file {file}: cannot be read ({cause}); name a file of prompts") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--file {file}: no prompt in it; write one on each line")
    chats = [Prompt(with_system([{"role": "user", "content": line}], system)) for _, line in numbered]
    return chats, [f"{file}:{number}" for number, _ in numbered]


def prompt_with(text: str, paths: Sequence[str], system: str | None) -> Prompt:
    """A prompt with images: at the marks `<image>` in its text, else before the text."""
    turns: Turns = [{"role": "user", "content": text}]
    if expected := expected_of(turns):
        raise UserError(f"PROMPT: expected {expected}")
    prompt = _pictured(turns, list(paths), "", "PROMPT")
    return prompt._replace(turns=with_system(prompt.turns, system))


def with_system(turns: Turns, system: str | None) -> Turns:
    """The turns, after the system message `system` if it is not empty and they have none of their own."""
    if not system or any(turn["role"] == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _parse(row: dict[str, Any]) -> tuple[Turns, list[Any], Tools]:
    """The turns of a row, with contents as they are given, the images of its column, and its tools."""
    column: Any = next((row[name] for name in _COLUMNS if row.get(name) is not None), [])
    images = column if isinstance(column, list) else [column]
    if "messages" in row:
        if expected := expected_of(given := row["messages"]):
            raise RowProblem("messages", expected)
        if any(turn.get("function_call") for turn in given):
            raise RowProblem("messages", "calls of tools in `tool_calls`, not in `function_call`")
        turns = [{name: value for name, value in turn.items() if name != "weight"} for turn in given]
    elif isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    else:
        raise RowProblem("prompt", "text, or `messages` instead")
    if row.get("chat_template_kwargs"):
        raise RowProblem("chat_template_kwargs", "no variables of the template, which are read in training alone")
    if not isinstance(system := row.get("system") or "", str):
        raise RowProblem("system", "text")
    return with_system(turns, system), images, _tools(row.get("tools") or None)


def _tools(given: Any) -> Tools:
    """The schemas of a row's tools, or of JSON of them, in the form that templates take."""
    with contextlib.suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if given is not None and not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        raise RowProblem("tools", "a list of schemas, or JSON of one")
    return given and [tool if "function" in tool else {"type": "function", "function": tool} for tool in given]


def _pictured(turns: Turns, column: list[Any], folder: str, where: str, tools: Tools = None) -> Prompt:
    """The turns, checked as those of a task, with a mark for each image, and the images.

    Args:
        column: images for parts without a path and for each `<image>` in a text; if there is neither, they stand before
            the first question. Without a column, `<image>` is a word.
        folder: the folder that relative paths begin at.
    """
    left = iter(column)
    contents = [_as_parts(turn.get("content") or "", where, split=bool(column)) for turn in turns]
    given = [part for parts in contents for part in parts if isinstance(part, dict)]  # `read_parts` names others
    places = [part for part in given if part.get("type") == "image" and len(part) == 1]
    if column and not places:
        first = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), 0)
        places = [{"type": "image"} for _ in column]
        contents[first] = [*places, *contents[first]]
    if len(places) != len(column):
        raise UserError(f"{where}: expected an image for each of {len(places)} {_IMAGE}, got {len(column)}")
    images: list[Picture] = []
    turns = [
        {**turn, "content": [_placed(part, left, folder) for part in parts]}
        for turn, parts in zip(turns, contents, strict=True)
    ]
    checked = checked_turns(turns, where, images)
    return Prompt(checked, tuple(Picture(picture.given, number) for number, picture in enumerate(images, 1)), tools)


def _as_parts(content: Any, where: str, *, split: bool) -> list[Any]:
    """A content as a list of parts; with `split`, each `<image>` in a text becomes a part of its own."""
    if isinstance(content, list):
        return content
    first, *following = content.split(_IMAGE) if split else [content]
    parts: list[Any] = [{"type": "text", "text": first}]
    for text in following:
        parts += [{"type": "image"}, {"type": "text", "text": text}]
    return parts


def _placed(part: Any, left: Iterator[Any], folder: str) -> Any:
    """A part with its image: the next one of the column if it has none; a relative path begins at the folder."""
    if not isinstance(part, dict) or part.get("type") not in ("image", "image_url"):
        return part
    if len(part) == 1:
        part = {**part, "image": next(left)}

    def placed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: inner if key in ("bytes", "base64") else placed(inner) for key, inner in value.items()}
        return os.path.join(folder, value) if isinstance(value, str) and ":" not in value[:10] else value

    return {key: value if key in ("type", "base64") else placed(value) for key, value in part.items()}


PROMPT = "> "
HELP = "/reset forgets what was said, /system TEXT changes the system message; Ctrl-C stops an answer, Ctrl-D leaves"


def talk(sides: Mapping[str, Answerer], system: str | None, max_new_tokens: int) -> None:
    """Answer what is typed until the end of the input. Each side keeps a history of its own.

    Args:
        sides: the models, by the names that are printed above their answers; a single model's name is not printed.
        system: the system message; None: there is none.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - input() then edits lines and knows earlier ones
    print(wrapped(HELP))
    histories: dict[str, Turns] = {name: [] for name in sides}
    while True:
        try:
            line = input(PROMPT).strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
            continue
        command, _, rest = line.partition(" ")
        if command in ("/reset", "/system"):
            histories = {name: [] for name in sides}
            if command == "/system":
                system = rest.strip() or None
            print(f"a new conversation, {'with' if system else 'without'} a system message")
        elif line.startswith("/"):
            print(wrapped(f"{command}: unknown; {HELP}"))
        elif line:
            for name, side in sides.items():
                if len(sides) > 1:
                    print(f"[{name}]")
                _answer(side, histories[name], line, system, max_new_tokens)


def _answer(side: Answerer, history: Turns, line: str, system: str | None, max_new_tokens: int) -> None:
    """Print an answer and add both turns to the history; a prompt that cannot be answered does not change it."""
    turns = [*history, {"role": "user", "content": line}]
    if expected := expected_of(turns):
        print(wrapped(f"expected {expected}"))
        return
    try:
        answer = side.stream(with_system(turns, system), max_new_tokens, _write)
    except UserError as error:
        for problem in error.problems:
            print(wrapped(printable(f"{problem}; /reset begins anew" if history else problem)))
        return
    print(printable("" if answer.ended else f" [cut after {answer.tokens} tokens]"))
    history[:] = [*turns, {"role": "assistant", "content": answer.text}]


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
