"""Reads and tokenizes the splits for an audit: rows that training would refuse are reported and left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation, limited_examples, read_split
from accel_sft.chat.dropped import AnswerDropped, NotAPrefix, TextDropped
from accel_sft.chat.encoded import (
    EMPTY_ANSWER,
    EQUAL_ANSWERS,
    NO_PROMPT,
    NO_REJECTED,
    NOTHING_TO_LEARN,
    UNPAIRED,
    Encoding,
    sequences,
)
from accel_sft.chat.template import Rejected
from accel_sft.data.token_store import StoredEncoding
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.rows.row_file import bad_rows_left_out
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.findings import NAMED, Findings
from accel_sft.tools.check.texts import without_index

SPLITS = ("train", "validation")
_CODES = {Rejected: "D202", NotAPrefix: "D203", AnswerDropped: "D204", TextDropped: "D213"}
_LEFT_OUT = {NOTHING_TO_LEARN: "D303", NO_PROMPT: "D309", NO_REJECTED: "D310", EQUAL_ANSWERS: "D311"}
_TOKENIZED = 1 << 20
"""Maximum number of characters of a too long row that is tokenized in full: 10 MB of text would take gigabytes."""


def read_splits(task: Task, findings: Findings, train_limit: str | None = None) -> dict[str, Sequence[Any]]:
    """Return the splits that can be read, and report the rows that `read_rows` refuses or leaves out."""
    splits: dict[str, Sequence[Any]] = {}
    reported: set[str] = set()  # problems and files reported so far: both splits may come from one file
    with bad_rows_left_out(NAMED) as bad_rows:
        for split in SPLITS:
            before = len(bad_rows)
            try:
                examples = read_split(task, split)
                splits[split] = limited_examples(examples, train_limit if split == "train" else None)
            except UserError as error:
                for line in error.problems:
                    if line not in reported:
                        findings.add("D103", split, detail=line)
                reported.update(error.problems)
            for bad in bad_rows[before:]:
                findings.add("D101" if bad.syntax else "D102", split, detail=bad.reason, place=bad.place)
            rows = splits.get(split)
            if isinstance(rows, Rows):
                for left_out in rows.left_out():
                    if left_out.places[0].file not in reported:
                        for place in left_out.places:
                            findings.add("D104", split, detail=left_out.reason, place=place)
                        findings.finding("D104", split).count += left_out.rows - len(left_out.places)
                reported.update(rows.files)
    return splits


def bad_rows_of(split: str, findings: Findings) -> int:
    """Return how many rows of a split `read_splits` left out."""
    return sum(findings.count(code, split) for code in ("D101", "D102", "D104"))


def encode_split(
    encode: SplitEncoder,
    examples: Sequence[Any],
    readable: np.ndarray,
    split: str,
    findings: Findings,
    truncation: str,
    folder: Path,
) -> StoredEncoding | None:
    """Tokenize a split as training does, but report and leave out each row that would stop training. Return None if no
    example is left, or if training would refuse the whole split.

    Args:
        readable: for each example, whether it can be read; unreadable examples have been reported before.
        folder: an empty folder, which must exist as long as the result is used.
    """
    refusal: UserError | None = None
    if readable.all():
        try:
            stored = encode(examples, split)
        except UserError as error:
            refusal = error
        else:
            _report_left_out(encode, examples, stored, findings, truncation)
            return stored
    refused: set[int] = set()

    def refuse(index: int, error: UserError) -> None:
        if readable[index]:
            refused.add(index)
            code = _CODES.get(type(error), "D205")
            findings.add(code, split, index, without_index(str(error), split, index))

    encoding = encode.leniently(examples, split, folder, refuse)
    _report_left_out(encode, examples, encoding, findings, truncation)
    if not isinstance(encoding, StoredEncoding):
        findings.finding("D307", split)
        return None
    if refusal and not refused:  # no single row is the cause
        findings.finding("D205", split).also = refusal.problems[-1]
        return None
    return encoding


def _report_left_out(
    encode: SplitEncoder, examples: Sequence[Any], encoding: Encoding, findings: Findings, truncation: str
) -> None:
    """Report the rows that were left out or truncated, except rows with empty answers: `read_texts` reports these."""
    split, rules = encoding.split, encode.rules
    for reason, rows in encoding.left_out.items():
        code = {rules.too_long: "D301", **_LEFT_OUT}.get(reason, "D205")
        for row in rows if reason != EMPTY_ANSWER else ():
            grade = "error" if code == "D301" and truncation == "error" else None
            findings.add(code, split, row, reason if code == "D205" else "", grade=grade)
    for row in encoding.cut:
        findings.add("D302", split, row)
    for row in encoding.unpaired if split == "train" else ():
        findings.add("D205", split, row, UNPAIRED)
    if too_long := (*encoding.left_out.get(rules.too_long, ()), *encoding.cut):
        code = "D302" if encoding.cut else "D301"
        findings.finding(code, split).also = _length_needed(encode, examples, too_long, split)


def _length_needed(encode: SplitEncoder, examples: Sequence[Any], too_long: Sequence[int], split: str) -> str:
    """Say how long the longest of these rows is: in tokens, or in characters if it is too long to be tokenized."""

    def characters(index: int) -> int:
        return sum(map(len, conversation(encode.task, examples, split, index).texts()))

    longest = max(too_long, key=characters)
    if characters(longest) > _TOKENIZED:
        return f"the longest text has {characters(longest):,} characters"
    rules = dataclasses.replace(encode.rules, max_length=1 << 40, truncation="drop")
    (part,) = encode.parts(examples, [longest], split, rules)
    return f"the longest text has {max(len(row.input_ids) for row in sequences(part.kept)):,} tokens"
