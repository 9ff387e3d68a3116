"""Ends a failed command: decides the message, the rank that prints it, the exit status and torchrun's record."""

import atexit
import contextlib
import hashlib
import io
import json
import os
import select
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn, TextIO

import click

from accel_sft.api.errors import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line, printable
from accel_sft.resilience import peers

_REPEATED = "same error as another rank on this machine"
"""Message that a rank records if another rank has already failed with the same error."""
EXPLAIN_SECONDS = 7.0
"""Maximum number of seconds that a rank with an unexpected error waits to learn whether a rank on another machine
failed first, and so broke this rank's collectives. `peers` shares a failure within six seconds."""
DISK_SECONDS = 3.0
"""Maximum number of seconds that a thread waits for the run's result to be on the disk before it ends this rank."""


class ExitHandler(contextlib.AbstractContextManager["ExitHandler"]):
    """Context manager that ends the process when its body raises. A UserError prints a line for each problem, and with
    `debug` also a traceback. An interrupt, an error of click or a lost rank prints one line. Any other error prints a
    traceback. If several ranks of a machine fail with the same message, only one of them prints it."""

    def __init__(self) -> None:
        self.debug = self._succeeded = False
        atexit.register(self._skip_teardown)  # registered early, because the function registered first is called last

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, click.exceptions.Exit):  # --help and --version
            _leave(error.exit_code)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self._succeeded = True
            return
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                report(error.code, error.code)
            _leave(error.code if isinstance(error.code, int) else 1)
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            _leave(141)  # as a shell reports SIGPIPE
        if isinstance(error, (KeyboardInterrupt, click.Abort)):
            message = str(error) or "interrupted"
            saved = hasattr(error, "status")  # an Interruption, which ends all ranks
            # an interruption is recorded too: to other ranks, a rank without a record looks killed
            report(message, message, failed=not saved)
            _leave(getattr(error, "status", 130))  # as a shell reports SIGINT
        if isinstance(error, click.ClickException):
            shown = io.StringIO()
            error.show(shown)
            report(shown.getvalue().rstrip(), error.format_message())
            _leave(error.exit_code)
        trace = "".join(traceback.format_exception(error))
        if isinstance(error, UserError):
            lines = printable("\n".join(f"Error: {line}" for line in error.problems))
            report(trace + lines if self.debug else lines, printable(str(error)))
        else:
            report(*self._unexpected(error, trace))
        _leave(1)

    def _unexpected(self, error: BaseException, trace: str) -> tuple[str, str]:
        """Return the text to print and the message to record for an unexpected error."""
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place, summary = f"{frame.filename}:{frame.lineno}", f"{type(error).__name__}: {error}".rstrip(": \n")
        message = f"{summary} ({place})"
        if not self.debug and (lost := lost_peers(EXPLAIN_SECONDS)):
            return f"Error: {lost}", lost
        if not self.debug and {text for _, text in _earlier_failures()} - {message, _REPEATED}:
            # another rank's death breaks this rank's collectives: its error is not the cause
            rank = os.environ.get("RANK", "0")
            return f"Error: rank {rank} ended after another rank had failed ({one_line(summary, 100)})", message
        return f"{trace}Error: unexpected in {place}: {summary}", message

    def _skip_teardown(self) -> None:
        """If this rank succeeded, end its process before Python tears down its modules. During that teardown, a gloo
        thread that frees its last tensor would abort the process (pytorch/pytorch#179291)."""
        if self._succeeded and os.environ.get("WORLD_SIZE", "1") != "1":
            _leave(0)


def _record_file() -> Path | None:
    """The file in which torchrun (or whatever started this process) looks for this rank's error."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(file).absolute() if file else None


def folder_of_ranks() -> Path | None:
    """torchrun's folder of this attempt, with a folder for each rank's error.json; None if the record file is not
    torchrun's but, for example, a container's /dev/termination-log."""
    own = _record_file()
    return own.parent.parent if own and own.name == "error.json" and own.parent.name.isdecimal() else None


def lost_peers(seconds: float = 0.0) -> str:
    """A sentence about ranks of this machine that ended, or about the first rank to fail on another machine; "" if
    there are none, or if a rank of this machine has recorded an error. Waits up to `seconds` for other machines."""
    from accel_sft.resilience.ranks import lost_ranks

    folder = folder_of_ranks()
    if folder is None or _earlier_failures():
        return ""
    return lost_ranks(folder) or peers.failure_elsewhere(seconds)


def failed_peer() -> str:
    """A sentence about the first rank of this machine that recorded an error; "" if none has."""
    return f"another rank failed: {min(failures)[1]}" if (failures := _earlier_failures()) else ""


def record_end(run_dir: RunDir, message: str) -> None:
    """Write into the run's result why a thread ends this rank. Waits at most DISK_SECONDS: the disk may hang too."""
    recording = threading.Thread(target=run_dir.write_ended, args=("failed", message), daemon=True)
    recording.start()
    recording.join(DISK_SECONDS)


def _earlier_failures() -> list[tuple[int, str]]:
    """The time in seconds and the message of each failure that other ranks of this machine have recorded."""
    folder = folder_of_ranks()
    files = [file for file in folder.glob("*/error.json") if file != _record_file()] if folder else []
    records = [json.loads(file.read_text(encoding="utf-8"))["message"] for file in files]
    return [(int(record["extraInfo"]["timestamp"]), record["message"]) for record in records]


def report(text: str, message: str, file: TextIO | None = None, *, failed: bool = True) -> None:
    """Record the message for torchrun's summary, print the text to `file` or standard error, and tell the other ranks
    if this rank `failed`. If ranks of a machine have the same text, only the first prints and tells."""
    first = _is_first(text)
    if own := _record_file():
        # for torchrun, the failure with the earliest time (in whole seconds) is the cause
        stamp = max([int(time.time()) + (not first), *(1 + earlier for earlier, _ in _earlier_failures())])
        message = message if first else _REPEATED
        # in the form of torchrun's ErrorHandler, but without a call stack: torchrun would show that instead
        record = {"message": {"message": message, "extraInfo": {"timestamp": str(stamp)}}}
        with contextlib.suppress(OSError):  # a broken disk
            own.with_suffix(".new").write_text(json.dumps(record), encoding="utf-8")
            own.with_suffix(".new").replace(own)  # another rank may be reading
    if first:
        _print(text, file)
        if failed:
            peers.tell(message)
    peers.leave()


def _is_first(text: str) -> bool:
    """Claim this text; returns whether this rank is the first of its machine to do so (true if the disk fails)."""
    folder = folder_of_ranks()
    if folder and folder.is_dir():
        claim = folder / f"said-{hashlib.sha256(text.encode('utf-8', 'replace')).hexdigest()[:16]}"
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            return False
        except OSError:
            return True
    return True


def _print(text: str, file: TextIO | None = None) -> None:
    folder, rank = folder_of_ranks(), os.environ.get("RANK", "0")
    if rank != "0" and not (folder and folder.is_dir()):
        text = f"[rank {rank}] {text}"
    with contextlib.suppress(OSError, UserError):  # the output's reader may be gone, or its disk full
        print(text, file=file or sys.stderr, flush=True)


def _stdout_is_closed() -> bool:
    """Whether the reader of our output has closed its end, as `head` does. (A failed flush shows this only once.)"""
    poll = select.poll()
    poll.register(1, 0)
    return any(event & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, event in poll.poll(0))


def leave_together() -> None:
    """Wait until all ranks are done. No rank destroys the process group, which can deadlock (seen with torch 2.6): the
    call holds the GIL until gloo's threads have ended, and a thread that frees a tensor waits for the GIL."""
    if _is_distributed():
        sys.modules["torch.distributed"].barrier()


def _is_distributed() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _leave(status: int) -> NoReturn:
    """Exit. With several ranks, skip destructors: they would wait for collectives that no other rank joins."""
    try:
        sys.stdout.flush()
    except (OSError, UserError):  # otherwise Python would report unwritten output at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if _is_distributed() or os.environ.get("WORLD_SIZE", "1") != "1":
        if not status:
            peers.leave()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(status)
    raise SystemExit(status) from None
