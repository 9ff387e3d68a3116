"""The terminal: inside `quiet` the libraries' output goes to a file, and only our own lines reach the terminal."""

import contextlib
import os
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from accel_sft.api.errors import UserError

SECONDS_OF_SILENCE = 5.0
"""Before `waiting` says what is waited for."""
_terminal: TextIO | None = None


@contextlib.contextmanager
def quiet(log_file: Path | None, debug: bool = False, shown_on: int = 1) -> Iterator[TextIO]:
    """Redirect everything that is printed inside to a file; the stream that is yielded still reaches the terminal.

    File descriptors are redirected, so that compilers and C libraries are caught with the rest. May be nested: the
    inner file takes over. With `debug` nothing is redirected.

    Args:
        log_file: appended to, its folder is made; None: a temporary file, shown on the terminal if the block raises.
        shown_on: file descriptor that our own lines reach; 2 where standard output is kept for a command's result.
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
            _terminal = stack.enter_context(open(os.dup(shown_on), "w", encoding="utf-8", buffering=1))
        sys.stdout.flush()
        sys.stderr.flush()
        for number in saved:
            os.dup2(log.fileno(), number)
        failed = False
        try:
            yield terminal()
        except BaseException as error:
            failed = not isinstance(error, UserError)  # which says all that is needed
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
def waiting(what: str) -> Iterator[None]:
    """Inside, a line says what is waited for and for how long: after 5 seconds, then after twice as many each time.

    Of several ranks rank 0 says it.
    """
    done, began, stream = threading.Event(), time.monotonic(), terminal()

    def tell() -> None:
        pause = SECONDS_OF_SILENCE
        while not done.wait(pause):
            print(f"{what}: {time.monotonic() - began:.0f} s so far", file=stream, flush=True)
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
    """Cells of the terminal's line, inside `quiet` too, where standard output is a file; 80 where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size(terminal().fileno()).columns or 80
    return 80


def wrapped(text: str, indent: int = 4) -> str:
    """`text` wrapped between words to the terminal's width; unchanged where there is no terminal."""
    if not terminal().isatty():
        return text
    return textwrap.fill(
        text, columns(), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )
