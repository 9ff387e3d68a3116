"""Reads a task's splits for an audit: rows that training would refuse become findings and are left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation, first_examples, read_split
from accel_sft.rows.bad_rows import bad_rows_left_out
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.findings import NAMED, Findings
from accel_sft.tools.check.texts import without_index

SPLITS = ("train", "validation")


def read_splits(task: Task, found: Findings, train_limit: str | None = None) -> dict[str, Sequence[Any]]:
    """Return the splits that can be read, and report the rows that `read_rows` refuses or leaves out of them."""
    splits: dict[str, Sequence[Any]] = {}
    files: dict[str, str] = {}
    told: set[str] = set()
    with bad_rows_left_out(NAMED) as bad_rows:
        for split in SPLITS:
            before = len(bad_rows)
            try:
                examples = read_split(task, split)
                splits[split] = first_examples(examples, train_limit if split == "train" else None)
            except UserError as error:
                for line in error.problems:
                    if line not in told:  # a task may read the same file for both splits
                        found.add("D103", split, detail=line)
                told.update(error.problems)
            for bad in bad_rows[before:]:
                files.setdefault(bad.place.file, split)
    rows_of = {split: examples for split, examples in splits.items() if isinstance(examples, Rows)}
    for split, rows in rows_of.items():
        for name in rows.files:
            files.setdefault(name, split)  # both splits may come from one file
    for bad in bad_rows:
        code = "D101" if bad.syntax else "D102"
        found.add(code, files.get(bad.place.file, ""), detail=bad.reason, place=bad.place)
    for split, rows in rows_of.items():
        for each in rows.left_out():
            if files[each.places[0].file] == split:
                for place in each.places:
                    found.add("D104", split, detail=each.reason, place=place)
                found.finding("D104", split).count += each.rows - len(each.places)
    return splits


class Selection(Sequence[Any]):
    """Some of a split's examples, and their `indices` in the split."""

    def __init__(self, examples: Sequence[Any], indices: np.ndarray) -> None:
        self.examples, self.indices = examples, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return Selection(self.examples, self.indices[at])
        return self.examples[int(self.indices[at])]

    def __iter__(self) -> Iterator[Any]:
        return (self[at] for at in range(len(self)))

    @property
    def sources(self) -> list[str] | None:
        return getattr(self.examples, "sources", None)

    def sources_of(self, indices: Sequence[int]) -> list[int]:
        whole: Any = self.examples
        found: list[int] = whole.sources_of(self.indices[list(indices)].tolist())
        return found


def selected(examples: Sequence[Any], good: np.ndarray) -> Sequence[Any]:
    """Return the examples for which `good` is true; if that is all, `examples`, whose fingerprint the cache knows."""
    return examples if good.all() else Selection(examples, np.flatnonzero(good))


def unreadable(task: Task, examples: Sequence[Any], split: str) -> Iterator[tuple[int, str]]:
    """Yield index and error of each example for which the task fails to give messages and target."""
    for index in range(len(examples)):
        try:
            conversation(task, examples, split, index)
        except UserError as error:
            yield index, without_index(str(error), split, index)


def bad_rows_of(split: str, found: Findings) -> int:
    """Return how many rows of a split are missing in what `read_splits` returned."""
    return sum(found.count(code, split) for code in ("D101", "D102", "D104"))
