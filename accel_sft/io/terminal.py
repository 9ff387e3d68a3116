"""Prints to the terminal. Inside `quiet`, the output of libraries goes to a file; only our own lines are printed."""

import contextlib
import io
import os
import re
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from accel_sft.api.errors import UserError

SECONDS_OF_SILENCE = 5.0
"""Seconds until `waiting` says what the program waits for."""
_COMMAND = re.compile(r"(next:)?\s*(accel-sft|accelerate|tensorboard) ")
_terminal: TextIO | None = None


def escape_unencodable() -> None:
    """From now on, print escapes for characters that the terminal's encoding lacks, and print each line immediately."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)


@contextlib.contextmanager
def quiet(log_file: Path | None, debug: bool = False, shown_on: int = 1) -> Iterator[TextIO]:
    """Redirect everything that is printed inside to a file; the stream that is yielded still reaches the terminal.

    File descriptors are redirected, which includes the output of compilers and C libraries. May be nested: the inner
    file takes over. Without `log_file` the file is temporary, and is printed to standard error if the block raises
    anything but UserError. Our own lines go to the descriptor `shown_on`: 2 if a command prints its result to 1.
    """
    global _terminal
    if debug:
        yield terminal()
        return
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    outer = _terminal
    with contextlib.ExitStack() as stack:
        opened = log_file.open("ab") if log_file else tempfile.TemporaryFile()  # noqa: SIM115 (closed by the stack)
        log = stack.enter_context(opened)
        saved = {number: os.dup(number) for number in (1, 2)}
        if outer is None:
            copy_of_terminal = os.fdopen(os.dup(shown_on), "w", 1, encoding="utf-8", errors="backslashreplace")
            _terminal = stack.enter_context(copy_of_terminal)
        sys.stdout.flush()
        sys.stderr.flush()
        for number in saved:
            os.dup2(log.fileno(), number)
        failed = False
        try:
            yield terminal()
        except BaseException as error:
            failed = not isinstance(error, UserError)  # a UserError says all that is needed
            raise
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, copy in saved.items():
                os.dup2(copy, number)
                os.close(copy)
            _terminal = outer
            if failed and log_file is None:
                log.seek(0)
                sys.stderr.write(log.read().decode(errors="replace"))


def terminal() -> TextIO:
    """The stream that reaches the person at the terminal, inside `quiet` and outside."""
    return _terminal or sys.stdout


@contextlib.contextmanager
def waiting(what: str | Callable[[], str]) -> Iterator[None]:
    """Inside, rank 0 prints a line that says what it waits for, after 5 seconds and then at doubling intervals."""
    done, stream = threading.Event(), terminal()
    began = time.monotonic()

    def tell() -> None:
        pause = SECONDS_OF_SILENCE
        while not done.wait(pause):
            line = what() if callable(what) else what
            print(f"{line}: {time.monotonic() - began:.0f} s so far", file=stream, flush=True)
            pause *= 2

    thread = threading.Thread(target=tell, name="waiting", daemon=True)
    if os.environ.get("RANK", "0") == "0":
        thread.start()
    try:
        yield
    finally:
        done.set()
        if thread.is_alive():
            thread.join()


def columns() -> int:
    """The terminal's width in cells, also inside `quiet`, where standard output is a file; 80 without a terminal."""
    with contextlib.suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(terminal().fileno()).columns or 80
    return 80


def wrapped(text: str, indent: int = 4) -> str:
    """`text` wrapped between words to the terminal's width; unchanged without a terminal, or if it is a command, since
    people copy commands."""
    if not terminal().isatty() or _COMMAND.match(text):
        return text
    return textwrap.fill(
        text, columns(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
