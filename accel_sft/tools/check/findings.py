"""What an audit finds: the codes with their fixes, and the rows of each code, placed in the files they came from.

docs/check.md lists the codes. `error`: training refuses the data, or would learn or measure something wrong.
`warning`: training leaves the row out, or the row is most likely a mistake. `note`: worth knowing. The meaning of a
code never changes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accel_sft.io.text import one_line
from accel_sft.rows.row_file import Place
from accel_sft.rows.rows import Rows

GRADES = ("error", "warning", "note")
"""Grades of findings, the gravest first."""


@dataclasses.dataclass(frozen=True)
class Code:
    """One kind of finding.

    Attributes:
        grade: one of `GRADES`.
        what: what is wrong, worded to follow "3 rows: ".
        fix: what the user can do about it.
    """

    grade: str
    what: str
    fix: str


_CODES = """
D101 error: not JSON, and training refuses the file -> fix these lines, or take them out
D102 error: the task's reader refuses the row, and training refuses the file
    -> give the field what is expected there, name the columns (--columns), or take the row out
D103 error: the examples cannot be read -> fix what is said here; the split could not be checked
D104 warning: the task's reader leaves the row out -> fix the row, or take it out; training goes on without it
D201 error: messages() or target() fails, or gives what is no conversation -> fix the row, or the task's method
D202 error: the model's chat template rejects the messages
    -> give roles and an order that this template takes, or choose another model
D203 error: the prompt is not a prefix of prompt and answer
    -> change what the answer begins with, or give the tokenizer a chat template that keeps the prompt
D204 error: the chat template drops or changes the answer
    -> --thinking keep if it is thinking; else change target(), or give the tokenizer another chat template
D205 error: training refuses these examples -> fix what is said here
D206 warning: the answer is empty, and the row is left out -> write the answer, or take the row out
D207 warning: no turn but the system's has text -> write the question; a model learns to answer nothing from it
D208 warning: special tokens of the model are written in the texts
    -> take them out: they are learnt as characters; what a template wrote is read by --control-tokens tokens
D209 error: the answer's own text has a token that ends the turn
    -> take it out: the chat template ends the turn, and this one is learnt as characters (--control-tokens text)
    or, with --control-tokens tokens, refused by training
D210 warning: characters that a wrong encoding leaves behind
    -> save the source as UTF-8 and read it as UTF-8; control characters belong in no text
D211 note: the answer begins or ends with white space
    -> strip it, unless it is meant: the model learns to write it where the template keeps it
D212 warning: --thinking keep, and the answer has no thinking
    -> write it before the answer, or leave these rows out: the model learns to answer such questions without it
D213 error: the chat template drops the text of a message
    -> give the tokenizer a chat template that writes every message, or change messages()
D215 warning: the chat template's prompts do not end in the header of the answer, which is learnt with it
    -> end the template with it, if add_generation_prompt: other servers show what was learnt in answers
D216 warning: a label is spelt nearly like a frequent one -> spell both alike, unless it is meant
D217 warning: a text is what programs write for a missing value, such as nan or None
    -> leave the value empty, or take the row out, unless the word is meant: it is learnt as a word
D218 warning: a label is trained on, and no validation row tests it
    -> hold out more rows, or give validation rows with each label (chat: --held-out, --data-seed, --validation-file)
D219 warning: a run on this split warns -> see the line
D301 warning: longer than --max-length, and left out -> raise --max-length, or shorten the rows
D302 warning: cut to --max-length: the end of the turn is not learnt
    -> raise --max-length, or leave them out with --truncation drop
D303 warning: no token of the answer is left to carry loss; left out
    -> write an answer that the tokenizer has tokens for
D304 error: the token that ends the turn carries no loss
    -> see that the tokenizer's eos_token is what its chat template ends an answer with
D305 error: the token that begins a text stands there twice -> take it out of the text: the chat template writes it
D306 warning: the tokenizer has no token for some of the text
    -> replace these characters, or choose a model that knows them
D307 error: no example is left to use -> fix what is listed for this split
D308 error: the collator supervises other tokens than the answer's -> report this as a defect
D309 warning: the chat template writes no prompt; left out
    -> see what the chat template makes of these rows, and what the tokenizer leaves of it
D401 warning: an earlier row of the split has the same prompt and answer
    -> take the copies out: each is learnt, or counted in the metric, once more
D402 note: the same as another row but for white space, case and punctuation -> keep one of them
D403 warning: an earlier row of the split has the same prompt, with another answer
    -> keep the right answer: the task does not score this answer as perfect for the earlier row
D404 error: a validation row is trained on too -> take it out of one of the splits: the metric would reward memory
D405 warning: a validation prompt is trained on, but for white space, case and punctuation
    -> take it out of one of the splits
D406 error: a validation prompt is trained on, with another answer
    -> take it out of one of the splits: the model is taught an answer that the metric may count as wrong
D501 error: the answer itself is not scored as perfect
    -> fix the answer, or the task's score(): no model can do better than this
D502 error: score() fails on the answer itself -> fix the row, or the task's score()
D601 error: the model has no embedding for a token of its tokenizer -> use the tokenizer that came with the weights
D602 warning: more tokens than the model has positions
    -> lower --max-length to the number of positions, or choose a model with a longer context
"""
"""Each code with its grade, what is wrong and, behind the arrow, the fix."""
CODES = {
    code: Code(grade, *" ".join(about.split()).split(" -> "))
    for code, grade, about in re.findall(r"^(D\d+) (\w+): (.*(?:\n    .*)*)", _CODES, re.MULTILINE)
}

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
        """Return the finding of this code and split; make it if there is none."""
        return self._by_code.setdefault((code, split), DataFinding(code, grade or CODES[code].grade, split))

    def count(self, code: str, split: str) -> int:
        """Return how many rows of this split have had this code so far."""
        finding = self._by_code.get((code, split))
        return finding.count if finding else 0

    def describe(self, beginning: Callable[[str, int], str]) -> None:
        """Give rows without a detail the beginning of their text, so that a reader recognises them."""
        for finding in self._by_code.values():
            for at, row in enumerate(finding.rows[:DESCRIBED]):
                if row.index is not None and not row.detail:
                    detail = one_line(beginning(row.split, row.index), DETAIL_CHARACTERS)
                    finding.rows[at] = dataclasses.replace(row, detail=detail)

    def placed(self, splits: Mapping[str, Sequence[Any]]) -> list[DataFinding]:
        """Return all findings, the gravest first; their rows are sorted, and say their file and line if known.

        Args:
            splits: the examples by split; examples that `read_rows` returned know their file and line.
        """

        def place_of(split: str, index: int | None) -> Place | None:
            examples = splits.get(split)
            return examples.places([index])[0] if isinstance(examples, Rows) and index is not None else None

        for finding in self._by_code.values():
            finding.rows = [
                dataclasses.replace(
                    row,
                    place=row.place or place_of(row.split, row.index),
                    like_place=place_of(*row.like) if row.like else None,
                )
                for row in sorted(finding.rows, key=_order)
            ]
        return sorted(
            self._by_code.values(), key=lambda finding: (GRADES.index(finding.grade), finding.code, finding.split)
        )
