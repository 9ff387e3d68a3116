"""Where a command writes its page: a file that is not there yet, or an older page, never anything else."""

from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.io.files import expanded

MARK = '<meta name="generator" content="accel-sft '
"""By which a page of a command of this package is known; its template has it in its head."""
_HEAD_CHARACTERS = 20_000


def page_file(name: str, flag: str, usual: str) -> Path:
    """The file that `flag` names for a page.

    Args:
        usual: what such a page is called, for the line on a folder.
    Raises:
        UserError: the page would replace something else, or lie in a folder that is not there.
    """
    path = expanded(name, flag)
    if path.is_dir():
        raise UserError(f"{flag} {path}: a folder; name a file, such as {path / usual}")
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {path.parent}; make it, or name another file")
    if path.exists() and not _is_page(path):
        raise UserError(f"{flag} {path}: a file that is no page of accel-sft; name another file")
    return path


def _is_page(path: Path) -> bool:
    if not path.is_file():  # a pipe or a terminal, which waits for who reads it
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.read(_HEAD_CHARACTERS)
