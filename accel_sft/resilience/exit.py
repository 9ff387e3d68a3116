"""How a command that failed ends: its message, the rank that prints it, its exit status, torchrun's record of it."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import select
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO

import click

from accel_sft.api.errors import UserError
from accel_sft.io.text import one_line
from accel_sft.resilience.lost_ranks import lost_ranks

INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


class ExitHandler(contextlib.AbstractContextManager["ExitHandler"]):
    """Ends the process when its body raises: a user's mistake in a line each, our own or a plugin's with a traceback.

    Under torchrun the ranks of a machine that fail alike print it once, a rank that fails alone prints its own, and
    the launcher's summary carries the message. Set `debug` for tracebacks everywhere.
    """

    def __init__(self) -> None:
        self.debug = False

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, click.exceptions.Exit):  # --help and --version
            _leave(error.exit_code)
        if error is None or isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
            return
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                _print_once(error.code)
            _leave(error.code if isinstance(error.code, int) else 1)
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            _leave(BROKEN_PIPE)
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            _print_once(str(error) or "interrupted")
            _leave(getattr(error, "status", INTERRUPTED))
        if isinstance(error, click.ClickException):
            shown = io.StringIO()
            error.show(shown)
            report(shown.getvalue().rstrip(), error.format_message())
            _leave(error.exit_code)
        if isinstance(error, UserError):
            self._user_error(error)
        self._unexpected(error)

    def _user_error(self, error: UserError) -> NoReturn:
        trace = "".join(traceback.format_exception(error)) if self.debug else ""
        report(trace + "\n".join(f"Error: {line}" for line in error.problems), str(error))
        _leave(1)

    def _unexpected(self, error: BaseException) -> NoReturn:
        summary = f"{type(error).__name__}: {error}".rstrip(": \n")
        message = f"{summary} ({_place(error)})"
        others = {text for _, text in _earlier_failures()}
        if not self.debug and (lost := lost_peers()):
            report(f"Error: {lost}", lost)
        elif (
            others - {message} and not self.debug
        ):  # a peer's death breaks the collectives of this rank: no cause to show
            report(f"Error: {_rank()} ended after another rank had failed ({one_line(summary, 100)})", message)
        else:
            trace = "".join(traceback.format_exception(error))
            report(f"{trace}Error: unexpected in {_place(error)}: {summary}", message)
        _leave(1)


def use_utf8() -> None:
    """Print any character: an ASCII terminal gets UTF-8, another gets an escape for what it cannot show."""
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


def lost_peers() -> str:
    """A sentence about ranks of this machine that ended, if none has recorded an error; "" if there are none."""
    return "" if _earlier_failures() else lost_ranks(_attempt_directory())


def _earlier_failures() -> list[tuple[int, str]]:
    """Time in seconds and message of each failure that other ranks of this machine have recorded."""
    directory, own = _attempt_directory(), Path(os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
    files = [file for file in directory.glob("*/error.json") if file != own] if directory else []
    records = [json.loads(file.read_text(encoding="utf-8"))["message"] for file in files]
    return [(int(record["extraInfo"]["timestamp"]), record["message"]) for record in records]


def report(text: str, message: str, file: TextIO | None = None) -> None:
    """Record the message for torchrun in its ErrorHandler's form, and print the text.

    Without a call stack in the record torchrun shows the message.

    Args:
        file: to print to, instead of standard error.
    """
    record_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if record_file:
        # torchrun's clock has whole seconds and it takes the earliest failure for the cause
        stamp = max([int(time.time()), *(1 + earlier for earlier, _ in _earlier_failures())])
        record = {"message": {"message": message, "extraInfo": {"timestamp": str(stamp)}}}
        try:
            Path(f"{record_file}.new").write_text(json.dumps(record), encoding="utf-8")
            os.replace(f"{record_file}.new", record_file)  # another rank may be reading
        except OSError as error:
            text += f"\n(the error could not be recorded for torchrun: {error})"
    _print_once(text, file)


def _print_once(text: str, file: TextIO | None = None) -> None:
    """Print unless another rank of this machine has printed the same; the first rank to claim a message prints it."""
    directory, several = _attempt_directory(), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if directory and directory.is_dir():
        claim = directory / f"said-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return
        except OSError as error:
            text += f"\n(other ranks may print this too: {error})"
    elif several and os.environ.get("RANK", "0") != "0":
        text = f"[{_rank()}] {text}"
    with contextlib.suppress(BrokenPipeError):
        print(text, file=file or sys.stderr, flush=True)


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "an unknown place"


def _stdout_is_closed() -> bool:
    """Whether the reader of our output has closed it, as `head` does. A failed flush would show that only once."""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))


def leave_together() -> None:
    """Destroy the process group once all ranks are done: a rank that just exits leaves threads that abort it."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.barrier()
        distributed.destroy_process_group()


def _leave(status: int) -> NoReturn:
    """Exit at once on several ranks: destructors there wait for collectives that no other rank will join."""
    if _stdout_is_closed():  # Python would complain about unwritten output as it exits
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    distributed = sys.modules.get("torch.distributed")
    running = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if running or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BrokenPipeError):
                stream.flush()
        os._exit(status)
    raise SystemExit(status) from None
