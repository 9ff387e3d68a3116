"""What was made once and is kept for later runs: a folder per content, complete or not there, known to be whole.

An entry is made under another name, written through to the disk and renamed, so that runs at the same time, or one
that is killed, leave nothing half done. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io import manifest

_ABANDONED_SECONDS = 3600
UNUSED_DAYS = 30
"""After which an entry is removed, when another one is made."""


def folder() -> Path:
    """`$ACCEL_SFT_CACHE`, else `$XDG_CACHE_HOME/accel_sft`, else `~/.cache/accel_sft`.

    Raises:
        OSError: there is no home.
    """
    if named := os.environ.get("ACCEL_SFT_CACHE"):
        return Path(named).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not base.is_absolute():
        raise FileNotFoundError(2, "no home folder, and ACCEL_SFT_CACHE is not set", str(base))
    return base / "accel_sft"


def where() -> str:
    """The cache's folder, to be named."""
    try:
        return str(folder())
    except OSError as error:
        return str(error.filename)


def find(kind: str, key: str) -> tuple[Path, dict[str, Any]] | None:
    """The entry's folder and what was written about it; None if it is not there, or damaged, which is told."""
    try:
        path = folder() / kind / key
        if not path.exists():
            return None
        about = manifest.verify(path)
        with contextlib.suppress(OSError):  # of a cache that may be read only
            os.utime(path)
        return path, about
    except manifest.Damaged as defect:
        log(f"{path}: damaged ({defect}); it is made again")
    except OSError as error:
        log(f"{error.filename}: cannot be read ({error.strerror}); it is made again")
    return None


def partial(kind: str) -> Path:
    """A new folder to fill, seal and `publish`; what dead processes left, or nobody has used for long, is removed.

    Raises:
        OSError: the cache cannot be written.
    """
    import shutil
    import tempfile

    (folder() / kind).mkdir(parents=True, exist_ok=True, mode=0o700)
    prefix = f".{socket.gethostname()}-"
    for left in (folder() / kind).glob(f"{prefix}*-*"):
        with contextlib.suppress(OSError, ValueError):  # another process may be removing it
            dead = not Path("/proc", str(int(left.name.removeprefix(prefix).split("-")[0]))).exists()
            newest = max(path.stat().st_mtime for path in (left, *left.iterdir()))
            if dead and Path("/proc/self").exists() and newest < time.time() - _ABANDONED_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    for entry in (folder() / kind).glob("[!.]*"):
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < time.time() - UNUSED_DAYS * 86400:
                shutil.rmtree(entry)  # a run that has it open keeps what it holds
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder() / kind))


def publish(made: Path, kind: str, key: str) -> Path:
    """Give a sealed folder its name, in the place of a damaged one; one that another run has put there stays."""
    import shutil

    target = folder() / kind / key
    aside = made.with_name(made.name + "-damaged")
    while True:
        try:
            made.rename(target)
            manifest.sync(target.parent)
            break
        except OSError:
            if not target.exists():
                raise
        try:
            manifest.verify(target)
            shutil.rmtree(made)
            break
        except manifest.Damaged:
            with contextlib.suppress(FileNotFoundError):  # another run was quicker
                target.rename(aside)
                shutil.rmtree(aside)
    return target


def discard(kind: str, key: str) -> None:
    """Take away an entry that is whole but wrong.

    Raises:
        UserError: it cannot be taken away.
    """
    import shutil

    path = folder() / kind / key
    try:
        made = partial(kind)
        try:
            path.rename(made / "discarded")
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        if path.exists():
            raise UserError(
                f"{path}: holds what does not belong there, and cannot be removed ({error.strerror}); remove it, or "
                "name another folder in ACCEL_SFT_CACHE"
            ) from None


def log(line: str) -> None:
    """Say it at the terminal, once for all ranks."""
    from accel_sft.io.terminal import terminal

    if os.environ.get("RANK", "0") == "0":
        print(line, file=terminal(), flush=True)
