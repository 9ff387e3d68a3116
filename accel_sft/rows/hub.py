"""Reads data sets of the Hugging Face hub or a mirror (HF_ENDPOINT) with `datasets`, an optional library."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.rows.formats import is_data_file, row_as_json
from accel_sft.rows.json_stream import Located

_SPLIT = r"[\w.-]+(\[[\d%:-]+\])?"
_NAME = re.compile(rf"(?P<id>[\w-][\w.-]*/[\w-][\w.-]*)(:(?P<config>[\w.-]+)(?=:))?(:(?P<split>{_SPLIT}))?")


def is_dataset_name(name: str) -> bool:
    """Whether `name` is ORG/NAME, ORG/NAME:SPLIT or ORG/NAME:CONFIG:SPLIT, no folder ORG exists, and `name` does not
    end like a data file. A split may have a slice in the form of `datasets`, such as train[:500] or train[10%:20%]."""
    path = Path(name)
    return bool(_NAME.fullmatch(name)) and not os.path.exists(path.parent) and not is_data_file(path)


def load(name: str) -> Any:
    """The `datasets.Dataset` called `name`; the split is train if `name` has none.

    Raises:
        UserError: `datasets` is not installed, or cannot load the data set.
    """
    try:
        import datasets
    except ImportError:
        raise UserError(
            f"{name}: not a file or folder; to read it as a data set of the hub: pip install datasets"
        ) from None
    found = _NAME.fullmatch(name)
    assert found  # callers ask `is_dataset_name` first
    split = found["split"] or "train"
    try:
        return datasets.load_dataset(found["id"], found["config"], split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        cause = one_line(f"{type(error).__name__}: {' '.join(str(error).split())}", LONGEST_ERROR)
        raise UserError(
            f"{name}: not a file or folder, and the hub gives no data set {found['id']}, split {split} ({cause}); "
            "write ORG/NAME:SPLIT, or ORG/NAME:CONFIG:SPLIT"
        ) from None


def rows_of(dataset: Any) -> Iterator[Located]:
    """The rows of a Dataset, each with its number (from 1) in place of a line."""
    for number, row in enumerate(dataset, 1):
        yield row_as_json(row, number)
