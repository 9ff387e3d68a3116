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
"""Maximum number of rows that a finding names; further rows are only counted."""
DETAIL_CHARACTERS, DESCRIBED = 300, 200
"""Maximum number of characters of a row's detail, and of a finding's rows whose detail may be the text's beginning."""


@dataclasses.dataclass(frozen=True)
class FoundRow:
    """One row that a finding names.

    Attributes:
        index: the example's index in its split; None for an unreadable row, or a remark on the whole split.
        detail: what is wrong with this row.
        like: split and index of the row that this one repeats.
        place, like_place: file and line of this row and of the repeated one, if the task reads with `read_rows`.
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
class DataFinding:
    """All rows of a split that have the same code, such as D301.

    Attributes:
        count: number of such rows; if the finding is about the whole split, number of remarks.
        rows: the first `NAMED` of these rows.
        also: a remark on the finding as a whole.
    """

    code: str
    grade: str
    split: str
    count: int = 0
    rows: list[FoundRow] = dataclasses.field(default_factory=list)
    also: str = ""

    @property
    def about(self) -> Code:
        return CODES[self.code]

    def as_dict(self) -> dict[str, Any]:
        """The finding as an object of the JSON report."""
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
        about = {"code": self.code, "grade": self.grade, "what": self.about.what, "fix": self.about.fix}
        return {**about, "split": self.split, "count": self.count, "also": self.also, "rows": rows}


def _order(row: FoundRow) -> tuple[Any, ...]:
    return (row.place.file, row.place.line or 0, row.place.row or 0) if row.place else ("", 0, row.index or 0)


class Findings:
    """Collects findings by code and split; memory does not grow with the number of rows."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], DataFinding] = {}

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
        """Add a row to the finding of this code and split; `grade` replaces the code's own grade."""
        finding = self.finding(code, split, grade)
        finding.count += 1
        if len(finding.rows) < NAMED:
            finding.rows.append(FoundRow(split, index, one_line(detail, DETAIL_CHARACTERS), like, place))

    def finding(self, code: str, split: str, grade: str | None = None) -> DataFinding:
        """Return the finding of this code and split; make it if there is none."""
        return self._found.setdefault((code, split), DataFinding(code, grade or CODES[code].grade, split))

    def count(self, code: str, split: str) -> int:
        """Return how many rows of this split have had this code so far."""
        finding = self._found.get((code, split))
        return finding.count if finding else 0

    def describe(self, beginning: Callable[[str, int], str]) -> None:
        """Give rows without a detail the beginning of their text, so that a reader recognises them."""
        for finding in self._found.values():
            for at, row in enumerate(finding.rows[:DESCRIBED]):
                if row.index is not None and not row.detail:
                    detail = one_line(beginning(row.split, row.index), DETAIL_CHARACTERS)
                    finding.rows[at] = dataclasses.replace(row, detail=detail)

    def placed(self, splits: Mapping[str, Sequence[Any]]) -> list[DataFinding]:
        """Return all findings, the gravest first; their rows are sorted, and say their file and line if known.

        Args:
            splits: the examples by split; examples that `read_rows` returned know their file and line.
        """
        wanted: dict[str, set[int]] = {split: set() for split in splits}
        for finding in self._found.values():
            finding.rows.sort(key=_order)
            for row in finding.rows:
                for split, index in filter(None, [(row.split, row.index), row.like]):
                    if index is not None and split in wanted:
                        wanted[split].add(index)
        places: dict[tuple[str, int | None], Place] = {}
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
