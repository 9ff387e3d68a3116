"""A conversation at the terminal: prompts are read line by line, answers appear as they are generated."""

import contextlib
import sys
from collections.abc import Mapping

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import Turns
from accel_sft.evaluation.answerer import Answerer, expected_of
from accel_sft.evaluation.prompts import with_system
from accel_sft.io.terminal import wrapped
from accel_sft.io.text import printable

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
