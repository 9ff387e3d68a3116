"""How a command that failed ends: what is printed, by which rank, with what status, and what torchrun is told."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import click

from accel_sft.options import UserError

INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


class Ending(contextlib.AbstractContextManager["Ending"]):
    """Ends the process when its body raises: a user's mistake in a line each, our own or a plugin's with a traceback.

    Under torchrun the ranks of a machine that fail alike print it once, a rank that fails alone prints its own, and
    the launcher's summary carries the message. Set `debug` for tracebacks everywhere.
    """

    def __init__(self) -> None:
        self.debug = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, (SystemExit, GeneratorExit)):
            if isinstance(error, SystemExit) and error.code not in (None, 0):
                _leave(error.code if isinstance(error.code, int) else 1, said=error.code)
            return
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            _leave(BROKEN_PIPE)
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            _print_once("interrupted")
            _leave(INTERRUPTED)
        if isinstance(error, click.ClickException):
            shown = io.StringIO()
            error.show(shown)
            _report(shown.getvalue().rstrip(), error.format_message())
            _leave(error.exit_code)
        if isinstance(error, UserError):
            self._user_error(error)
        self._unexpected(error)

    def _user_error(self, error: UserError) -> NoReturn:
        trace = "".join(traceback.format_exception(error)) if self.debug else ""
        _report(trace + "\n".join(f"Error: {line}" for line in error.problems), str(error))
        _leave(1)

    def _unexpected(self, error: BaseException) -> NoReturn:
        summary = f"{type(error).__name__}: {error}".rstrip(": \n")
        earlier = _earlier_failure()
        if earlier and not self.debug:  # a peer's death breaks this rank's collectives: the peer's message is the cause
            _report(f"Error: {_rank()} ended after another rank had failed ({summary.splitlines()[0]})", summary)
        else:
            trace = "".join(traceback.format_exception(error))
            _report(f"{trace}Error: unexpected in {_place(error)}: {summary}", f"{summary} ({_place(error)})")
        _leave(1)


def use_utf8() -> None:
    """Let no character end a run: a terminal that cannot show it gets an escape, one without a choice gets UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            plain = stream.encoding.lower() in ("ascii", "ansi_x3.4-1968", "us-ascii")
            stream.reconfigure(encoding="utf-8" if plain else stream.encoding, errors="backslashreplace")


def _rank() -> str:
    return f"rank {os.environ.get('RANK', '0')}"


def _attempt_directory() -> Path | None:
    """The folder torchrun makes for one attempt of this machine's ranks, holding a folder for each local rank."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).parent.parent if file else None


def _earlier_failure() -> int:
    """Time in seconds at which another rank of this machine recorded its failure; 0 when none has."""
    directory, own = _attempt_directory(), os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    others = [file for file in directory.glob("*/error.json") if file != Path(own)] if directory else []
    return int(min((file.stat().st_mtime for file in others), default=0))


def _report(text: str, message: str) -> None:
    """Tell torchrun, then the terminal."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    earlier = _earlier_failure()
    if file:
        # torchrun's clock has whole seconds and it shows the earliest failure as the cause
        stamp = max(int(time.time()), earlier + 1 if earlier else 0)
        record = {"message": {"message": message, "extraInfo": {"timestamp": str(stamp)}}}
        try:
            Path(file).write_text(json.dumps(record), encoding="utf-8")
        except OSError as error:
            text += f"\n(torchrun could not be told: {error})"
    _print_once(text)


def _print_once(text: str) -> None:
    """Print unless another rank of this machine has printed the same; the first rank to claim a message prints it."""
    directory, several = _attempt_directory(), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if directory and directory.is_dir():
        claim = directory / f"said-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError as error:
            text += f"\n(the ranks could not agree who prints this: {error})"
    elif several and os.environ.get("RANK", "0") != "0":
        text = f"[{_rank()}] {text}"
    with contextlib.suppress(BrokenPipeError):
        print(text, file=sys.stderr, flush=True)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _stdout_is_closed() -> bool:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        return True
    return False


def _leave(status: int, said: object = None) -> NoReturn:
    """Exit at once on several ranks: destructors there wait for collectives that no other rank will join."""
    if isinstance(said, str):
        _print_once(said)
    closed = _stdout_is_closed()
    if closed:  # or the interpreter flushes it again on its way out, and complains
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if running or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        with contextlib.suppress(BrokenPipeError):
            sys.stderr.flush()
        os._exit(status)
    raise SystemExit(status) from None
