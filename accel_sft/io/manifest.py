"""Distinguishes complete folders from damaged ones: a manifest, written last, has each file's size and SHA-256.

Needs only the standard library.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from accel_sft.io.heartbeat import heartbeat

MANIFEST = "manifest.json"
_BLOCK = 1 << 20
THREADS = 8
"""Number of threads that hash files: hashing releases the GIL, and one core hashes slower than disks read."""


class Damaged(Exception):
    """Says how a folder differs from its manifest."""


Entries = Mapping[str, list[Any]]
"""Size and SHA-256 of files, by their names in the folder."""


def write(
    folder: Path, about: dict[str, Any], entries_so_far: Entries | None = None, *, among: Iterable[str] | None = None
) -> None:
    """Write the manifest: `about` (JSON), and size and SHA-256 of every file below `folder` (or only of the files in
    `among`). `entries_so_far` has entries that were computed while files were written. Sync everything to disk."""
    names = [name for name in (_names(folder) if among is None else sorted(among)) if name != MANIFEST]
    entries_so_far = entries_so_far or {}
    with ThreadPoolExecutor(THREADS) as threads:
        entries = threads.map(lambda name: entries_so_far.get(name) or _synced_entry(folder / name), names)
        files = dict(zip(names, entries, strict=True))
    (folder / MANIFEST).write_text(_text({"files": files, "about": about}), encoding="utf-8")
    sync(folder / MANIFEST)
    for path in [*(path for path in folder.rglob("*") if path.is_dir()), folder]:
        sync(path)


def about(folder: Path) -> dict[str, Any]:
    """Return the `about` that was given to `write`, or raise Damaged; does not check the folder's files."""
    return _content(folder)["about"]


def identity(folder: Path) -> str | None:
    """SHA-256 of the folder's manifest, which changes with any file of the folder; None if it cannot be read."""
    try:
        return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    except OSError:
        return None


def entries(folder: Path) -> Entries:
    """The files in the folder's manifest, with size and SHA-256; Damaged if the manifest is missing or changed."""
    return _content(folder)["files"]


def paths(folder: Path) -> list[Path]:
    """The files that the folder's manifest names, in order; readers of the folder open no other files."""
    return [folder / name for name in entries(folder)]


def verify(folder: Path) -> dict[str, Any]:
    """Check every byte of the folder, and return the `about` that was given to `write`; Damaged if a file differs."""
    content = _content(folder)
    if extra := sorted({*_names(folder)} - content["files"].keys() - {MANIFEST}):  # e.g. copied from elsewhere
        raise Damaged(f"{extra[0]} is not in {MANIFEST}: accel_sft did not write this file; remove it")
    for name, what in differences(folder):
        raise Damaged(f"{name} {what}")
    return content["about"]


def differences(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each file that differs from the manifest, and how; raises Damaged if the manifest itself is damaged."""
    files, same = _content(folder)["files"], []
    for name, (size, _) in files.items():
        try:
            there = (folder / name).lstat()
        except FileNotFoundError:
            yield name, "is missing"
            continue
        if not stat.S_ISREG(there.st_mode):  # a device may have no end
            yield name, "is not a regular file"
        elif there.st_size != size:
            yield name, f"has {there.st_size} bytes, but {size} were written"
        else:
            same.append(name)
    with ThreadPoolExecutor(THREADS) as threads:
        digests = threads.map(lambda name: _digest(folder / name), same)
        for name, digest in zip(same, digests, strict=True):
            if digest != files[name][1]:
                yield name, "has changed since it was written"


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _names(folder: Path) -> list[str]:
    """Return the relative paths of all files below a folder, except .nfs* (deleted files that NFS still keeps)."""
    files = (path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(str(path.relative_to(folder)) for path in files if not path.name.startswith(".nfs"))


def _content(folder: Path) -> dict[str, Any]:
    try:
        if (folder / MANIFEST).exists() and not (folder / MANIFEST).is_file():
            raise Damaged(f"{MANIFEST} is not a regular file")
        text = (folder / MANIFEST).read_text(encoding="utf-8")
        content = json.loads(text)["content"]
        if text != _text(content):
            raise Damaged(f"{MANIFEST} has changed since it was written")
        for name, (size, digest) in content["files"].items():
            inside = not Path(name).is_absolute() and ".." not in Path(name).parts
            if not (inside and type(size) is int and isinstance(digest, str) and isinstance(content["about"], dict)):
                raise Damaged(f"{MANIFEST} has entries that no run writes")
        return content
    except FileNotFoundError:
        raise Damaged(f"no {MANIFEST}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Damaged(f"{MANIFEST} cannot be understood") from None


def _synced_entry(path: Path) -> list[Any]:
    """Sync a file to the disk; returns its size and SHA-256."""
    sync(path)
    return [path.stat().st_size, _digest(path)]


def write_hashed(path: Path, parts: Iterable[memoryview]) -> list[Any]:
    """Write the bytes of `parts` to a new file and sync it to the disk; return its size and SHA-256."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as file:
        for part in parts:
            for start in range(0, len(part), _BLOCK):  # between blocks, Python's other threads can run
                block = part[start : start + _BLOCK]
                heartbeat()
                digest.update(block)
                size += file.write(block)
        file.flush()
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):  # not on macOS; keeps the page cache for training data
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return [size, digest.hexdigest()]


def _digest(path: Path) -> str:
    digest, block = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            heartbeat()
            digest.update(block[:count])
    return digest.hexdigest()


def _text(content: dict[str, Any]) -> str:
    """Return the manifest's exact text, so that comparing it with the file reveals even a changed space."""
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps({"sha256": digest, "content": content}, indent=1) + "\n"
