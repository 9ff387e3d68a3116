"""Defines the codes of an audit's findings, with their fixes, and collects the rows of each code by file and line.

docs/check.md lists the codes. `error`: training refuses the data, or would learn or measure something wrong.
`warning`: training leaves the row out, or the row is most likely a mistake. `note`: worth knowing. The meaning of a
code never changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.io.text import one_line
from accel_sft.rows.row_file import Place
from accel_sft.rows.rows import Rows

GRADES = ("error", "warning", "note")
"""Grades of findings, the gravest first."""


@dataclasses.dataclass(frozen=True)
class Code:
    """One kind of finding. `what` says what is wrong, in words that can follow "3 rows: "; `fix` says what to do."""

    grade: str
    what: str
    fix: str


_CODES = """
D101 error: not JSON, and training refuses the file -> fix these lines, or take them out
D102 error: the task's reader refuses the row, and training refuses the file -> fix the field named here
D103 error: the examples cannot be read -> fix the problem named here; the split could not be checked
D104 warning: the task's reader leaves the row out -> fix the row, or take it out
D201 error: messages() or target() fails, or does not return a conversation -> fix the row, or the task's method
D202 error: the model's chat template rejects the messages -> give roles and an order that this template takes
D203 error: the prompt is not a prefix of prompt and answer -> change what the answer begins with
D204 error: the chat template drops or changes the answer
    -> if thinking was dropped, use --thinking keep; otherwise change target()
D205 error: training refuses these examples -> fix the problem named here
D206 warning: the answer is empty, and the row is left out -> write the answer, or take the row out
D207 warning: only the system turn has text -> write the question: the model would learn to answer without a question
D208 warning: special tokens of the model are written in the texts
    -> take them out: they are learnt as characters; if a template wrote them, use --control-tokens tokens
D209 error: the answer's own text has a token that ends the turn -> take it out: the chat template ends the turn
D210 warning: characters that come from a wrong encoding -> save the source as UTF-8, without control characters
D211 note: the answer begins or ends with white space -> strip it, unless it is intended
D213 error: the chat template drops the text of a message -> use a chat template that writes every message
D215 warning: the chat template's prompts do not end with the answer's header, so the header is learnt too
    -> let the template end with the header if add_generation_prompt: servers would show a learnt header in answers
D216 warning: a label is spelt almost like a frequent label -> spell both alike, unless they are different labels
D217 warning: a text is what programs write for a missing value, such as nan or None
    -> leave the value empty, or take the row out, unless the word is intended: it is learnt as a word
D218 warning: a label is trained on, and no validation row tests it
    -> hold out more rows, or give validation rows with each label (chat: --held-out, --data-seed, --validation-file)
D219 warning: training warns about this split -> see the warning
D301 warning: longer than --max-length, and left out -> raise --max-length, or shorten the rows
D302 warning: cut to --max-length: the end of the turn is not learnt -> raise --max-length, or use --truncation drop
D303 warning: no token of the answer carries loss; left out -> write an answer whose text becomes tokens
D304 error: the token that ends the turn carries no loss
    -> set the tokenizer's eos_token to the token with which its chat template ends an answer
D305 error: the token that begins a text (BOS) is there twice -> take it out of the text: the chat template writes it
D306 warning: the tokenizer has no token for some of the text -> replace these characters
D307 error: no example is left to use -> fix the other findings of this split
D309 warning: the chat template writes no prompt; left out -> see what the chat template makes of these rows
D310 warning: there is no rejected answer, and the row is left out -> give one, or take the row out
D311 warning: the chosen and the rejected answer are equal, and the row is left out
    -> correct one of the answers, or take the row out; if they were cut, raise --max-length
D401 warning: an earlier row of the split has the same prompt and answer -> take the copies out
D403 warning: an earlier row of the split has the same prompt, but another answer
    -> keep the right answer: the task does not score this answer as perfect for the earlier row
D404 error: a validation row is trained on too -> take it out of one of the splits: the metric would reward memorising
D406 error: a validation prompt is trained on, but with another answer -> take it out of one of the splits
D501 error: the expected answer is not scored as perfect -> fix it, or the task's score(): no model can do better
D502 error: score() fails on the expected answer -> fix the row, or the task's score()
D503 warning: the rejected answer is scored as better than the chosen one -> swap them, or correct the task's score()
D601 error: the model has no embedding for a token of its tokenizer -> use the tokenizer that came with the weights
D602 warning: more tokens than the model has positions -> lower --max-length to the number of positions
"""
"""Each code with its grade, what is wrong and, after the arrow, the fix."""
CODES = {
    code: Code(grade, *" ".join(about.split()).split(" -> "))
    for code, grade, about in re.findall(r"^(D\d+) (\w+): (.*(?:\n    .*)*)", _CODES, re.MULTILINE)
}

NAMED = 1000
"""Maximum number of rows that a finding names; further rows are only counted."""
DETAIL_CHARACTERS = 300
"""Maximum number of characters of a row's detail."""


@dataclasses.dataclass
class FoundRow:
    """One row that a finding names.

    Attributes:
        index: the example's index in its split; None if the row is unreadable or the whole split is meant.
        like: split and index of the row that this row repeats; `like_place` is that row's file and line.
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
    """All rows of a split with the same code, such as D301: their `count`, the first `NAMED` rows, and a remark on the
    whole finding (`also`). If the finding is about the whole split, `count` is how often it was added."""

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
            {"index": row.index, "where": row.where, "detail": row.detail, "like": row.like_where or None}
            for row in self.rows
        ]
        about = {"code": self.code, "grade": self.grade, "what": self.about.what, "fix": self.about.fix}
        return {**about, "split": self.split, "count": self.count, "also": self.also, "rows": rows}


def _order(row: FoundRow) -> tuple[Any, ...]:
    return (row.place.file, row.place.line or 0, row.place.row or 0) if row.place else ("", 0, row.index or 0)


class Findings:
    """Collects findings by code and split; memory does not grow with the number of rows."""

    def __init__(self) -> None:
        self._by_code: dict[tuple[str, str], DataFinding] = {}

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
        """Return the finding of this code and split; create it if it does not exist yet."""
        return self._by_code.setdefault((code, split), DataFinding(code, grade or CODES[code].grade, split))

    def count(self, code: str, split: str) -> int:
        """Return how many rows of this split have had this code so far."""
        finding = self._by_code.get((code, split))
        return finding.count if finding else 0

    def placed(self, splits: Mapping[str, Sequence[Any]]) -> list[DataFinding]:
        """Return all findings, the gravest first, with their rows sorted. Rows name their file and line if `read_rows`
        read the examples of `splits`."""

        def place_of(split: str, index: int | None) -> Place | None:
            examples = splits.get(split)
            return examples.places([index])[0] if isinstance(examples, Rows) and index is not None else None

        for finding in self._by_code.values():
            for row in finding.rows:
                row.place = row.place or place_of(row.split, row.index)
                row.like_place = place_of(*row.like) if row.like else None
            finding.rows.sort(key=_order)
        return sorted(
            self._by_code.values(), key=lambda finding: (GRADES.index(finding.grade), finding.code, finding.split)
        )
