"""Reads prompts outside of tasks: from lines of text, from rows with messages or a prompt, from one PROMPT with images,
or from a conversation at the terminal."""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Tools, Turns, checked_turns
from accel_sft.chat.pictures import Picture
from accel_sft.evaluation.answerer import Answerer, Prompt, expected_of
from accel_sft.io.terminal import wrapped
from accel_sft.io.text import printable
from accel_sft.rows.json_stream import RowProblem
from accel_sft.rows.rows import read_rows

_IMAGE = "<image>"


def read_prompts(file: str, system: str | None) -> tuple[list[Prompt], list[str]]:
    """The conversations of a file, and the place of each, for error messages. A `.json` or `.jsonl` file has rows with
    `messages` or `prompt`; other files have a prompt on each non-blank line. `system` is the default system message."""
    if Path(file).suffix in (".json", ".jsonl"):
        rows = read_rows(file, _parse)
        names = [str(place) for place in rows.places(range(len(rows)))]
        prompts = []
        for (turns, tools), where in zip(rows, names, strict=True):
            images: list[Picture] = []
            prompts.append(Prompt(with_system(checked_turns(turns, where, images), system), (), tools))
            if images:
                raise UserError(f"{where}: the row has images; give images with --image and a single PROMPT")
        return prompts, names
    try:
        lines = Path(file).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"--file {file}: cannot be read ({cause}); name a file of prompts") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UserError(f"--file {file}: it has no prompts; write one on each line")
    chats = [Prompt(with_system([{"role": "user", "content": line}], system)) for _, line in numbered]
    return chats, [f"{file}:{number}" for number, _ in numbered]


def prompt_with(text: str, paths: Sequence[str], system: str | None) -> Prompt:
    """A prompt with images. They are placed at the marks `<image>` in its text or, without marks, before the text."""
    pieces = text.split(_IMAGE) if paths else [text]
    pieces = pieces if pieces[1:] else [""] * len(paths) + [text]
    if len(pieces) - 1 != len(paths):
        count = f"{len(pieces) - 1} marks {_IMAGE}, but --image is given {len(paths)} times"
        raise UserError(f"PROMPT: there are {count}; give one image for each mark")
    parts: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
    for path, piece in zip(paths, pieces[1:], strict=True):
        parts += [{"type": "image", "image": path}, {"type": "text", "text": piece}]
    turns: Turns = [{"role": "user", "content": parts if paths else text}]
    if expected := expected_of(turns):
        raise UserError(f"PROMPT: expected {expected}")
    images: list[Picture] = []
    turns = checked_turns(turns, "PROMPT", images)
    return Prompt(with_system(turns, system), tuple(images))


def with_system(turns: Turns, system: str | None) -> Turns:
    """The turns after the system message `system`; unchanged if it is empty, or if the turns have a system message."""
    if not system or any(turn.get("role") == "system" for turn in turns):
        return turns
    return [{"role": "system", "content": system}, *turns]


def _parse(row: dict[str, Any]) -> tuple[Turns, Tools]:
    """The turns of a row, with unchanged contents, and the row's tools."""
    for column in ("images", "image"):
        if row.get(column):
            raise RowProblem(column, "no images in a file; give images with --image and a single PROMPT")
    if "messages" in row:
        if expected := expected_of(given := row["messages"]):
            raise RowProblem("messages", expected)
        if any(turn.get("function_call") for turn in given):
            raise RowProblem("messages", "tool calls in `tool_calls`, not in `function_call`")
        turns = [{name: value for name, value in turn.items() if name != "weight"} for turn in given]
    elif isinstance(row.get("prompt"), str):
        turns = [{"role": "user", "content": row["prompt"]}]
    else:
        raise RowProblem("prompt", "text, or `messages` instead")
    if row.get("chat_template_kwargs"):
        raise RowProblem("chat_template_kwargs", "no value: only training passes these variables to the chat template")
    if not isinstance(system := row.get("system") or "", str):
        raise RowProblem("system", "text")
    return with_system(turns, system), _tools(row.get("tools") or None)


def _tools(given: Any) -> Tools:
    """The schemas of a row's tools (objects, or their JSON text), in the form that templates take."""
    with contextlib.suppress(ValueError):
        given = json.loads(given) if isinstance(given, str) else given
    if given is not None and not (isinstance(given, list) and all(isinstance(tool, dict) for tool in given)):
        raise RowProblem("tools", "a list of schemas, or its JSON text")
    return given and [tool if "function" in tool else {"type": "function", "function": tool} for tool in given]


PROMPT = "> "
HELP = "/reset forgets what was said, /system TEXT changes the system message; Ctrl-C stops an answer, Ctrl-D leaves"


def talk(sides: Mapping[str, Answerer], system: str | None, max_new_tokens: int) -> None:
    """Let all models in `sides` answer each typed line, until the input ends. Each model has a name and a history."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - lets input() edit lines and recall earlier ones
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
    """Print an answer and add both turns to the history, which stays unchanged if the prompt cannot be answered."""
    turns = [*history, {"role": "user", "content": line}]
    if expected := expected_of(turns):
        print(wrapped(f"expected {expected}"))
        return
    try:
        answer = side.stream(with_system(turns, system), max_new_tokens, _write)
    except UserError as error:
        for problem in error.problems:
            print(wrapped(printable(f"{problem}; /reset starts a new conversation" if history else problem)))
        return
    print(printable("" if answer.ended else f" [cut after {answer.tokens} tokens]"))
    history[:] = [*turns, {"role": "assistant", "content": answer.text}]


def _write(text: str) -> None:
    sys.stdout.write(printable(text))
    sys.stdout.flush()
