"""Collects what an audit finds, row by row, and places it in the files that the rows came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_sft.io.text import one_line
from accel_sft.rows.bad_rows import Place
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.codes import CODES, GRADES, Code

NAMED = 1000
"""Rows of one finding that are named at most; the others are counted."""
DETAIL_CHARACTERS, DESCRIBED = 300, 200
"""Of what a row's line says, and rows of a finding that are shown by their text."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One row that a finding names.

    Attributes:
        index: of the example in its split; None for a row that could not be read.
        detail: what is wrong with this one.
        like: split and index of the row that it repeats.
        place, like_place: file and line, where the task gives what `read_rows` returned.
    """

    split: str
    index: int | None
    detail: str = ""
    like: tuple[str, int] | None = None
    place: Place | None = None
    like_place: Place | None = None

    @property
    def where(self) -> str:
        return str(self.place) if self.place else "" if self.index is None else f"{self.split} example {self.index}"

    @property
    def like_where(self) -> str:
        if self.like_place or not self.like:
            return str(self.like_place or "")
        return f"{self.like[0]} example {self.like[1]}"


@dataclasses.dataclass
class Finding:
    """All rows of a split with one code. `rows` are the first of `count`; none where it is about the whole split."""

    code: str
    grade: str
    split: str
    count: int = 0
    rows: list[Row] = dataclasses.field(default_factory=list)
    also: str = ""

    @property
    def about(self) -> Code:
        return CODES[self.code]

    def as_dict(self) -> dict[str, Any]:
        """As `--json` gives it."""
        rows = [
            {
                "index": row.index,
                "file": row.place and row.place.file,
                "line": row.place and row.place.line,
                "row": row.place and row.place.row,
                "detail": row.detail,
                "like": row.like_where or None,
            }
            for row in self.rows
        ]
        about = {"code": self.code, "grade": self.grade, "what": self.about.what, "mend": self.about.mend}
        return {**about, "split": self.split, "count": self.count, "also": self.also, "rows": rows}


def _order(row: Row) -> tuple[Any, ...]:
    return (row.place.file, row.place.line or 0, row.place.row or 0) if row.place else ("", 0, row.index or 0)


class Findings:
    """What is found, by code and split; memory does not grow with the number of rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Finding] = {}

    def add(
        self,
        code: str,
        split: str,
        index: int | None = None,
        detail: str = "",
        *,
        like: tuple[str, int] | None = None,
        place: Place | None = None,
        grade: str | None = None,
    ) -> None:
        """Add a row to the finding of this code and split; `grade` where it is not the code's own."""
        finding = self.finding(code, split, grade)
        finding.count += 1
        if len(finding.rows) < NAMED:
            finding.rows.append(Row(split, index, one_line(detail, DETAIL_CHARACTERS), like, place))

    def finding(self, code: str, split: str, grade: str | None = None) -> Finding:
        """The finding of this code and split, made if need be."""
        return self._found.setdefault((code, split), Finding(code, grade or CODES[code].grade, split))

    def count(self, code: str, split: str) -> int:
        """Rows with this code so far."""
        finding = self._found.get((code, split))
        return finding.count if finding else 0

    def describe(self, beginning: Callable[[str, int], str]) -> None:
        """Give rows that have no detail the beginning of their text, which shows which ones they are."""
        for finding in self._found.values():
            for at, row in enumerate(finding.rows[:DESCRIBED]):
                if row.index is not None and not row.detail:
                    detail = one_line(beginning(row.split, row.index), DETAIL_CHARACTERS)
                    finding.rows[at] = dataclasses.replace(row, detail=detail)

    def placed(self, splits: Mapping[str, Sequence[Any]]) -> list[Finding]:
        """All findings, the gravest first, their rows in order and with their places in files.

        Args:
            splits: the examples by split; those that `read_rows` returned know their places.
        """
        wanted: dict[str, set[int]] = {split: set() for split in splits}
        for finding in self._found.values():
            finding.rows.sort(key=_order)
            for row in finding.rows:
                for split, index in filter(None, [(row.split, row.index), row.like]):
                    if index is not None and split in wanted:
                        wanted[split].add(index)
        places: dict[tuple[str, int], Place] = {}
        for split, indices in wanted.items():
            if isinstance(examples := splits[split], Rows):
                ordered = sorted(indices)
                places |= {(split, i): place for i, place in zip(ordered, examples.places(ordered), strict=True)}
        for finding in self._found.values():
            finding.rows = [
                dataclasses.replace(
                    row,
                    place=row.place or places.get((row.split, row.index)),
                    like_place=places.get(row.like) if row.like else None,
                )
                for row in finding.rows
            ]
        return sorted(self._found.values(), key=lambda each: (GRADES.index(each.grade), each.code, each.split))
