"""Checks where a command may write its HTML page: to a new file or over an older page, never over anything else."""

from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.io.files import expanded

MARK = '<meta name="generator" content="accel-sft '
"""Identifies a page that a command of this package wrote: every page's template has it in the head."""
_HEAD_CHARACTERS = 20_000


def page_file(name: str, flag: str, usual: str) -> Path:
    """Return the path of the page that the option `flag` names.

    Args:
        usual: the usual name of such a page, which the error about a folder suggests.
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
    if not path.is_file():  # reading a pipe or a terminal could block
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return MARK in file.read(_HEAD_CHARACTERS)
