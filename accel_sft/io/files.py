"""Replaces files and folders as a whole or not at all, and reads and writes JSON. Needs only the standard library."""

import contextlib
import errno
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from accel_sft.api.errors import UserError
from accel_sft.io.manifest import sync

PAGE_MARK = '<meta name="generator" content="accel-sft '
"""Text in the head of every HTML page that a command of this package writes, in the page's first 20,000 characters."""


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to the file `path`; if the process or the machine dies, this is either the old or the new file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    """Replace `path` by a line of JSON for each row; NaN becomes null."""
    write_atomically(path, "".join(json.dumps(json_safe(row), ensure_ascii=False) + "\n" for row in rows))


def begin_folder(target: Path) -> Path:
    """Make an empty folder beside `target`, to fill and then move to `target` with `put_in_place`."""
    partial = _partial(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def put_in_place(partial: Path, target: Path) -> None:
    """Sync a folder to the disk and rename it to `target`; remove the old `target` last."""
    _sync_all(partial)
    outgoing = target.with_name(f".{target.name}.outgoing")
    remove(outgoing, ignore_errors=True)
    if target.exists():
        target.rename(outgoing)
    partial.rename(target)
    sync(target.parent)
    remove(outgoing, ignore_errors=True)


def remove(folder: Path, *, ignore_errors: bool = False) -> None:
    """Remove what `folder` names: a folder, a file, or a link (but not the link's target)."""
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=ignore_errors)


def _sync_all(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        if path.suffix == ".safetensors":  # safetensors makes files that only their owner may read
            path.chmod(folder.stat().st_mode & 0o666)
        sync(path)


@contextlib.contextmanager
def new_folder(name: str, flag: str) -> Iterator[Path]:
    """Make a folder to fill: it becomes `name` when the block ends, and is removed if the block raises. Errors name the
    argument or option `flag`."""
    # not at the top: this module must load on Windows, which lacks locks, so that a message can refuse Windows
    from accel_sft.io.lock import is_locked, lock

    target = Path(os.path.realpath(expanded(name, flag)))  # if `name` is a link, the link's target is filled
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{flag} {name}: not empty; name another folder")
        if is_locked(_partial(target)):
            raise UserError(f"{flag} {name}: another process is writing it; name another folder")
        partial = begin_folder(target)
        try:
            lock(partial)
            yield partial
            _sync_all(partial)
            partial.rename(target)  # fails if there is a file, or a folder that is not empty
            sync(target.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{flag} {name}: cannot be written ({error.strerror or error}); name another folder") from error
    except Exception as error:
        if not isinstance(error, UserError) and (trouble := trouble_of_writing(error, target.parent)):
            raise UserError(f"{flag} {name}: {trouble}, or name another folder") from error
        raise


def trouble_of_writing(error: Exception, folder: Path) -> str:
    """What is wrong with a folder in which writing failed, and what to do; "" if no cause is found. This looks at the
    folder itself, because code in C++, in Rust and in threads does not report errno."""
    if not folder.is_dir():
        return "the folder is gone; put it back"
    if not os.access(folder, os.W_OK):
        return "the folder can no longer be written; make it writable"
    if os.strerror(errno.ENOSPC) in str(error) or shutil.disk_usage(folder).free < 2**20:
        return "the disk is full; free space"
    limits = [os.strerror(number) for number in (errno.EDQUOT, errno.EFBIG) if os.strerror(number) in str(error)]
    return f"{limits[0].lower()}; free space, or raise the limit" if limits else ""


def expanded(name: str, flag: str = "--model") -> Path:
    """The path `name` with ~ expanded; UserError, which names the option `flag`, if there is no such home folder."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        raise UserError(f"{flag} {name}: no user has this home folder; write the full path") from None


def made_folder(path: Path, *, mine: bool) -> Path:
    """Make this folder, unless it exists, and return it. With `mine`, the folder is always new: if the name is taken,
    as when two commands choose the same name in one second, a number is appended, such as -2."""
    path.parent.mkdir(parents=True, exist_ok=True)
    made, number = path, 1
    while True:
        try:
            made.mkdir(exist_ok=not mine)
            return made
        except FileExistsError:
            if not mine:  # a file has the name
                raise
            number += 1
            made = path.with_name(f"{path.name}-{number}")


def abandoned(folder: Path) -> list[Path]:
    """The files that a killed `write_atomically` left in a folder; valid only if no other process is writing there."""
    return [path for path in folder.glob(".*.tmp") if path.name.split(".")[-2].isdecimal()]


def json_safe(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinity, which JSON does not have, at any depth."""
    if isinstance(value, Mapping):
        return {key: json_safe(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path, errors: str = "strict") -> str:
    """Return a regular file's text; OSError for anything else, such as an endless pipe or device."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return path.read_text("utf-8", errors)


def read_json(path: Path) -> Any:
    """The content of a JSON file of a run; raises UserError if it cannot be read."""
    try:
        return json.loads(read_text(Path(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error}); put it back, or start a new run") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run; {} if the file is missing, damaged or half-written."""
    try:
        return mapping(read_json(path))
    except UserError:
        return {}


def read_json_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The JSON objects in the lines of a file, and the number of other lines, such as half-written lines."""
    rows, unreadable = [], 0
    for line in filter(None, read_text(path, "replace").split("\n")):  # splitlines() would also split at U+2028
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            rows.append(row)
        else:
            unreadable += 1
    return rows, unreadable


def mapping(value: Any) -> dict[str, Any]:
    """Return `value` if it is a dict, else an empty dict: a damaged or edited file may hold anything."""
    return value if isinstance(value, dict) else {}


def is_number(value: Any) -> TypeGuard[float]:
    """Whether `value` is a float or an integer of at most 63 bits: JSON may hold integers too large for a float."""
    return isinstance(value, float) or (type(value) is int and value.bit_length() < 64)


def page_file(name: str, flag: str) -> Path:
    """Return the path of the HTML page that the option `flag` names; UserError if another file is there."""
    path = expanded(name, flag)
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{flag} {path}: expected the name of a file in an existing folder")
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:
            if PAGE_MARK not in file.read(20_000):
                raise UserError(f"{flag} {path}: this file is not a page of accel-sft; name another file")
    return path
