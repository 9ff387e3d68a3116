"""The cache: each entry is a folder, found by a hash of what decides its content, and verified when it is opened.

An entry is made under a temporary name, synced to the disk and renamed, so that neither concurrent nor killed runs
leave a partial entry. A folder of another user is not used, because a manifest reveals damage but no forgery. Needs
only the standard library.
"""

import contextlib
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_sft.io import manifest
from accel_sft.io.files import expanded
from accel_sft.io.terminal import terminal

UNUSED_DAYS, ABANDONED_DAYS = 30, 1
"""Days after which an unused entry, or an unchanged partial entry, is removed; this happens when an entry is made."""


def folder() -> Path:
    """The cache's folder; without a home folder it is a relative path, and the cache is not used."""
    if named := os.environ.get("ACCEL_SFT_CACHE"):
        return expanded(named, "ACCEL_SFT_CACHE").absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "accel_sft")


def find(kind: str, key: str) -> tuple[Path, dict[str, Any]] | None:
    """Return an entry's folder and its `about` (see `publish`); None if absent, damaged (logged) or another user's."""
    path = folder() / kind / key
    try:
        if not path.is_absolute() or not path.exists() or not _is_mine(path.parent):
            return None
        about = manifest.verify(path)
        with contextlib.suppress(OSError):  # the cache may be read-only
            os.utime(path)
        return path, about
    except (manifest.Damaged, OSError) as defect:
        log(f"{path}: damaged ({defect}); it is made again")
    return None


def _is_mine(base: Path) -> bool:
    """Whether this user or root owns both the folder `base` of entries and the cache's folder."""
    return all(folder.stat().st_uid in (os.getuid(), 0) for folder in (base, base.parent))


@contextlib.contextmanager
def partial(kind: str) -> Iterator[Path]:
    """Make a folder to fill and `publish`; if it is not published, it is removed. Old entries are removed first."""
    base = folder() / kind
    if not base.is_absolute():
        raise FileNotFoundError(2, "no home folder, and ACCEL_SFT_CACHE is not set", str(base))
    base.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # `mode` does not apply to parents
    base.mkdir(exist_ok=True, mode=0o700)
    if not _is_mine(base):
        reason = f"{base} belongs to another user"
        raise PermissionError(errno.EPERM, reason, str(base))
    for entry in base.iterdir():
        with contextlib.suppress(OSError):  # another process may be removing it
            hidden = entry.name.startswith(".")
            newest = max(path.stat().st_mtime for path in (entry, *(entry.iterdir() if hidden else ())))
            if newest < time.time() - (ABANDONED_DAYS if hidden else UNUSED_DAYS) * 86400:
                shutil.rmtree(entry)  # a run that has opened its files can still read these
    made = Path(tempfile.mkdtemp(prefix=".", dir=base))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)  # a published folder no longer has this name


def publish(made: Path, kind: str, key: str, about: dict[str, Any]) -> Path:
    """Write a folder's manifest, with `about` in it, and rename the folder to the entry's name. A damaged entry is
    replaced; an intact entry that another run made stays. Returns the entry's folder."""
    manifest.write(made, about)
    target = folder() / kind / key
    if target.exists() and not find(kind, key):
        discard(kind, key)
    try:
        made.rename(target)
    except OSError:
        if not target.exists():  # otherwise another run was quicker
            raise
    manifest.sync(target.parent)
    return target


def discard(kind: str, key: str) -> None:
    """Remove an entry as a whole, so that no run finds a part of it."""
    with partial(kind) as aside, contextlib.suppress(FileNotFoundError):  # another run was quicker
        (folder() / kind / key).rename(aside / "removed")


def log(line: str) -> None:
    """Print a line at the terminal, from rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(line, file=terminal(), flush=True)
