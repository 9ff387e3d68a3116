"""Finds the data files of a folder. Needs only the standard library."""

import os
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.rows.formats import COMPRESSIONS, READERS, format_of, is_data_file

_ABOUT_DATA = frozenset({"dataset_dict.json", "dataset_info.json", "dataset_infos.json"})
"""Files that describe a data set of the hub and hold none of its rows."""


def data_files(folder: Path) -> list[Path]:
    """The data files of a folder and its subfolders, except hidden files and those that describe a data set.

    Links are followed, and each folder is read once. Texts (.txt) are data where there is nothing else; a README.md
    never is.

    Raises:
        UserError: there are no data files, or a subfolder cannot be read.
    """

    def failed(error: OSError) -> None:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror}); make it readable, or take it away")

    found: list[Path] = []
    texts: list[Path] = []
    seen = set()
    for parent, folders, names in os.walk(folder, onerror=failed, followlinks=True):
        if (real := os.path.realpath(parent)) in seen:  # a link has led to a folder that was read already
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = [Path(parent, name) for name in names if not name.startswith(".") and name not in _ABOUT_DATA]
        # a broken link is kept, so that the reader reports it
        there = [path for path in paths if path.is_file() or not path.exists()]
        found += filter(is_data_file, there)
        texts += [path for path in there if format_of(path).suffix == ".txt"]
    found = sorted(found or texts)
    if not found:
        compressed = ", ".join(COMPRESSIONS)
        raise UserError(
            f"{folder}: no data files in this folder; expected {', '.join(READERS)}, or {compressed} of one"
        )
    return found
