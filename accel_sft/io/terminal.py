"""The terminal: inside `quiet` the libraries' output goes to a file, and only our own lines reach the terminal."""

import contextlib
import os
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from accel_sft.api.errors import UserError

_terminal: TextIO | None = None


@contextlib.contextmanager
def quiet(log_file: Path | None, debug: bool = False) -> Iterator[TextIO]:
    """Redirect everything that is printed inside to a file; the stream that is yielded still reaches the terminal.

    File descriptors are redirected, so that compilers and C libraries are caught with the rest. May be nested: the
    inner file takes over. With `debug` nothing is redirected.

    Args:
        log_file: appended to, its folder is made; None: a temporary file, shown on the terminal if the block raises.
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
            _terminal = stack.enter_context(open(os.dup(1), "w", encoding="utf-8", buffering=1))
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


def wrapped(text: str, indent: int = 4) -> str:
    """`text` wrapped between words to the terminal's width; unchanged where there is no terminal."""
    if not terminal().isatty():
        return text
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(text, columns, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
