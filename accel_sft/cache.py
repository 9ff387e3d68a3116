"""What was made once and is kept for later runs: a folder per content, complete or not there, known to be whole.

An entry is made under another name, written through to the disk and renamed, so that runs at the same time, or one
that is killed, leave nothing half done. Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import time
import zlib
from pathlib import Path
from typing import Any

from accel_sft.options import UserError

ABOUT = "about.json"
_BLOCK = 1 << 20
_ABANDONED_SECONDS = 3600
UNUSED_DAYS = 30
"""After which an entry is removed, when another one is made."""


class Damaged(Exception):
    """Why an entry is not what was written."""


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
        about = _checked(path)
        with contextlib.suppress(OSError):  # of a cache that may be read only
            os.utime(path)
        return path, about
    except Damaged as defect:
        tell(f"{path}: damaged ({defect}); it is made again")
    except OSError as error:
        tell(f"{error.filename}: cannot be read ({error.strerror}); it is made again")
    return None


def _checked(path: Path) -> dict[str, Any]:
    """What was written about the entry, every byte of which is as it was written."""
    try:
        sealed = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        if sealed["sha256"] != _sha256(sealed["content"]):
            raise Damaged(f"{ABOUT} is not what was written")
        files = sealed["content"]["files"].items()
    except FileNotFoundError:
        raise Damaged(f"no {ABOUT}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Damaged(f"{ABOUT} cannot be understood") from None
    for name, (size, checksum) in files:
        try:
            there = (path / name).stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{name} is missing") from None
        if there != size:
            raise Damaged(f"{name} has {there} bytes, {size} were written")
        if _checksum(path / name) != checksum:
            raise Damaged(f"{name} has other bytes than were written")
    return sealed["content"]["about"]


def partial(kind: str) -> Path:
    """A new folder to fill, `seal` and `publish`; what dead processes left, or nobody has used for long, is removed.

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


def seal(made: Path, about: dict[str, Any]) -> None:
    """Write `about` (JSON) with sizes and checksums of all files in `made`, and see everything on the disk."""
    files = {}
    for path in sorted(made.iterdir()):
        _sync(path)
        files[path.name] = [path.stat().st_size, _checksum(path)]
    content = {"files": files, "about": about}
    text = json.dumps({"sha256": _sha256(content), "content": content}, ensure_ascii=False)
    (made / ABOUT).write_text(text, encoding="utf-8")
    _sync(made / ABOUT)
    _sync(made)


def publish(made: Path, kind: str, key: str) -> Path:
    """Give a sealed folder its name, in the place of a damaged one; one that another run has put there stays."""
    import shutil

    target = folder() / kind / key
    aside = made.with_name(made.name + "-damaged")
    while True:
        try:
            made.rename(target)
            _sync(target.parent)
            break
        except OSError:
            if not target.exists():
                raise
        try:
            _checked(target)
            shutil.rmtree(made)
            break
        except Damaged:
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


def tell(line: str) -> None:
    """Say it at the terminal, once for all ranks."""
    from accel_sft.terminal import terminal

    if os.environ.get("RANK", "0") == "0":
        print(line, file=terminal(), flush=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> int:
    """CRC-32 of a file: against accidents, at the speed of memory, and without mapping the file into it."""
    found, block = 0, memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            found = zlib.crc32(block[:size], found)
    return found


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
