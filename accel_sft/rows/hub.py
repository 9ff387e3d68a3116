"""Reads data sets of the Hugging Face hub or a mirror (HF_ENDPOINT) with `datasets`, an optional library."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.folder import chosen_split
from accel_sft.rows.formats import is_data_file

_SPLIT = r"[\w.-]+(\[[\d%:-]+\])?"
_NAME = re.compile(
    rf"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-]+))?(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>{_SPLIT}))?"
)


def is_dataset_name(name: str) -> bool:
    """Whether `name` is ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT, no folder ORG exists, and `name` does not
    end like a data file. Behind NAME may stand @REVISION: a branch, tag or commit. A split may have a slice in the form
    of `datasets`, such as train[:500] or train[10%:20%]."""
    path = Path(name)
    return bool(_NAME.fullmatch(name)) and not os.path.exists(path.parent) and not is_data_file(path)


def load(name: str, use: str) -> tuple[Any, list[str]]:
    """The `datasets.Dataset` called `name`, and a line on the other splits if `name` has none.

    Args:
        use: "train" or "validation", by which the split is chosen.
    Raises:
        UserError: `datasets` is not installed, or cannot load the data set; or none of its splits has the usual name.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: not a file or folder; to read it as a data set of the hub: pip install datasets"
        ) from None
    found = _NAME.fullmatch(name)
    assert found  # callers ask `is_dataset_name` first
    split = found["split"]
    of_split = f", split {split}" if split else ""
    try:
        loaded = datasets.load_dataset(found["id"], found["config"], split=split, revision=found["revision"])
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", LONGEST_ERROR)
        raise UserError(
            f"{name}: not a file or folder, and the hub gives no data set {found['id']}{of_split} ({cause}); "
            "write ORG/NAME:SPLIT, or ORG/NAME:CONFIG:SPLIT"
        ) from None
    if split:
        return loaded, []
    split, lines = chosen_split(name, [*loaded], use)
    return loaded[split], lines
