"""The cache: folders found by a hash of their content, complete or absent, and verified when they are opened.

An entry is made under another name, written through to the disk and renamed, so that runs at the same time, or one
that is killed, leave no partial entry. Standard library only.
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
"""Days without use after which an entry is removed, when another one is made."""


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
    """The cache's folder as messages name it."""
    try:
        return str(folder())
    except OSError as error:
        return str(error.filename)


def find(kind: str, key: str) -> tuple[Path, dict[str, Any]] | None:
    """The entry's folder and what was written about it; None if it is absent or damaged, which is logged."""
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
    """A new folder to fill, to write a manifest in and to `publish`; abandoned and long unused folders are removed.

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
                shutil.rmtree(entry)  # a run that has it open keeps its files
    return Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=folder() / kind))


def publish(made: Path, kind: str, key: str) -> Path:
    """Give a folder with a manifest its name, in place of a damaged one; an entry that another run made stays."""
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
    """Remove an entry that is complete but wrong.

    Raises:
        UserError: it cannot be removed.
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
                f"{path}: has the wrong content, and cannot be removed ({error.strerror}); remove it, or "
                "name another folder in ACCEL_SFT_CACHE"
            ) from None


def log(line: str) -> None:
    """Print a line at the terminal, from rank 0 only."""
    from accel_sft.io.terminal import terminal

    if os.environ.get("RANK", "0") == "0":
        print(line, file=terminal(), flush=True)
