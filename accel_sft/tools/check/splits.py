"""Reads and tokenizes the splits for an audit: rows that training would refuse are reported and left out. Finds
rows that repeat each other, within a split and between splits, by hashes of prompts and answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation, limited_examples, read_split
from accel_sft.chat.dropped import AnswerDropped, NotAPrefix, TextDropped
from accel_sft.chat.encoded import EMPTY_ANSWER, NO_PROMPT, NOTHING_TO_LEARN, Encoding
from accel_sft.chat.template import Rejected
from accel_sft.data.token_store import StoredEncoding
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.rows.row_file import bad_rows_left_out
from accel_sft.rows.rows import Rows
from accel_sft.tools.check.findings import NAMED, Findings
from accel_sft.tools.check.texts import Texts, without_index

SPLITS = ("train", "validation")
_CODES = {Rejected: "D202", NotAPrefix: "D203", AnswerDropped: "D204", TextDropped: "D213"}
_MOST_REFUSED = 200
"""Number of refused rows at which a split is given up: with so many, chat template and task do not fit each other."""
_MEASURED = 256
"""Maximum number of rows above --max-length whose tokens are counted, to say which --max-length would keep them."""
_TOKENIZED = 1 << 20
"""If one of these rows has more characters, no tokens are counted: tokenizing a text of 10 MB takes gigabytes."""


def read_splits(task: Task, findings: Findings, train_limit: str | None = None) -> dict[str, Sequence[Any]]:
    """Return the splits that can be read, and report the rows that `read_rows` refuses or leaves out of them."""
    splits: dict[str, Sequence[Any]] = {}
    split_of: dict[str, str] = {}  # the first split that reads a file: both may come from one
    reported: set[str] = set()
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
                split_of.setdefault(bad.place.file, split)
    rows_of = {split: examples for split, examples in splits.items() if isinstance(examples, Rows)}
    for split, rows in rows_of.items():
        for name in rows.files:
            split_of.setdefault(name, split)
    for bad in bad_rows:
        code = "D101" if bad.syntax else "D102"
        findings.add(code, split_of.get(bad.place.file, ""), detail=bad.reason, place=bad.place)
    for split, rows in rows_of.items():
        for left_out in rows.left_out():
            if split_of[left_out.places[0].file] == split:
                for place in left_out.places:
                    findings.add("D104", split, detail=left_out.reason, place=place)
                findings.finding("D104", split).count += left_out.rows - len(left_out.places)
    return splits


def unreadable(task: Task, examples: Sequence[Any], split: str) -> Iterator[tuple[int, str]]:
    """Yield index and error of each example whose messages or target the task fails to give."""
    for index in range(len(examples)):
        try:
            conversation(task, examples, split, index)
        except UserError as error:
            yield index, without_index(str(error), split, index)


def bad_rows_of(split: str, findings: Findings) -> int:
    """Return how many rows of a split are missing in what `read_splits` returned."""
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
    """Tokenize a split as training does, but report each row that would stop training, and leave it out.

    Args:
        readable: whether each example can be read; the others have been reported.
        truncation: the value of `--truncation`; even if it is "error", `encode` drops rows that are too long.
        folder: an empty folder that lasts as long as the result.
    Returns:
        None if no example is left, too many are refused, or training refuses the whole split.
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
        if len(refused) == _MOST_REFUSED:
            raise _TooManyRefused(f"{_MOST_REFUSED} rows are refused; the others were not tokenized")

    try:
        encoding = encode.leniently(examples, split, folder, refuse)
    except _TooManyRefused as error:
        findings.finding("D205", split).also = str(error)
        return None
    _report_left_out(encode, examples, encoding, findings, truncation)
    if not isinstance(encoding, StoredEncoding):
        findings.finding("D307", split)
        return None
    if refusal and not refused:  # no single row is the cause
        findings.finding("D205", split).also = refusal.problems[-1]
        return None
    return encoding


class _TooManyRefused(UserError):
    """So many rows are refused that the split is given up."""


def _report_left_out(
    encode: SplitEncoder, examples: Sequence[Any], encoding: Encoding, findings: Findings, truncation: str
) -> None:
    """Report the rows that were left out or truncated, without empty answers, which `read_texts` has reported."""
    split, rules = encoding.split, encode.rules
    for reason, rows in encoding.left_out.items():
        code = {rules.too_long: "D301", NOTHING_TO_LEARN: "D303", NO_PROMPT: "D309"}.get(reason, "D205")
        for row in rows if reason != EMPTY_ANSWER else ():
            grade = "error" if code == "D301" and truncation == "error" else None
            findings.add(code, split, row, reason if code == "D205" else "", grade=grade)
    for row in encoding.cut:
        findings.add("D302", split, row)
    too_long = sorted((*encoding.left_out.get(rules.too_long, ()), *encoding.cut))
    if too_long:
        code = "D302" if encoding.cut else "D301"
        some = too_long[:_MEASURED]
        findings.finding(code, split).also = _length_needed(encode, examples, some, split, len(too_long))


def _length_needed(encode: SplitEncoder, examples: Sequence[Any], some: list[int], split: str, count: int) -> str:
    which = "the longest" if len(some) == count else f"the longest of the first {len(some)}"
    chats = (conversation(encode.task, examples, split, index) for index in some)
    characters = max(sum(map(len, chat.texts())) for chat in chats)
    if characters > _TOKENIZED:
        return f"{which} has {characters:,} characters"
    rules = dataclasses.replace(encode.rules, max_length=1 << 40, truncation="drop")
    parts = encode.parts(examples, some, split, rules)
    longest = max(len(row.input_ids) for part in parts for row in part.kept)
    return f"{which} has {longest:,} tokens"


Accepts = Callable[[str, int, int], bool]
"""Takes a split and two indices, and says whether the second example's answer is right for the first example too."""


def first_with_same(hashes: np.ndarray) -> np.ndarray:
    """Return for each row the index of the first row with the same hash, which may be the row's own index."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse]


def found_in(hashes: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return for each of `hashes` the index of its first occurrence in `others`; -1 if it does not occur there."""
    if not len(others):
        return np.full(len(hashes), -1)
    values, first = np.unique(others, return_index=True)
    at = np.minimum(np.searchsorted(values, hashes), len(values) - 1)
    return np.where(values[at] == hashes, first[at], -1)


def within(texts: Texts, split: str, findings: Findings, accepts: Accepts, in_file: bool) -> dict[str, int]:
    """Report copies, near copies and contradictions within a split.

    Args:
        in_file: whether the rows come from a file; a program that makes rows may repeat them on purpose.
    Returns:
        counts for the figures: `distinct_prompts`, `distinct_rows`, and `other_right_answers`, which are rows that
        repeat an earlier prompt with another right answer.
    """
    usable = np.flatnonzero(texts.usable)
    prompts, pairs = texts.prompts[usable], texts.pairs[usable]
    first_pair, first_prompt = first_with_same(pairs), first_with_same(prompts)
    first_loose = first_with_same(texts.loose_pairs[usable])
    at = np.arange(len(usable))
    copies, new = first_pair < at, first_pair == at
    grade = "warning" if in_file or split == "validation" else "note"
    for row in at[copies]:
        findings.add("D401", split, int(usable[row]), like=(split, int(usable[first_pair[row]])), grade=grade)
    for row in at[new & (first_loose < at)]:
        findings.add("D402", split, int(usable[row]), like=(split, int(usable[first_loose[row]])))
    accepted = 0
    for row in at[new & (first_prompt < at) & (first_loose == at)]:
        first, other = int(usable[first_prompt[row]]), int(usable[row])
        if accepts(split, first, other):
            accepted += 1
        else:
            findings.add("D403", split, other, like=(split, first))
    return {
        "distinct_prompts": len(np.unique(prompts)),
        "distinct_rows": int(new.sum()),
        "other_right_answers": accepted,
    }


def between(train: Texts, validation: Texts, findings: Findings) -> None:
    """Report validation rows whose prompt is in the training split too, exactly or nearly, with whatever answer."""
    trained, rows = np.flatnonzero(train.usable), np.flatnonzero(validation.usable)
    report_leaks(
        [validation.prompts[rows], validation.pairs[rows], validation.loose_prompts[rows]],
        [train.prompts[trained], train.pairs[trained], train.loose_prompts[trained]],
        rows,
        trained,
        findings,
    )


def report_leaks(
    validation: list[np.ndarray], train: list[np.ndarray], rows: np.ndarray, trained: np.ndarray, findings: Findings
) -> None:
    """Report validation rows whose prompt is trained on.

    Args:
        validation, train: each split's hashes of prompts, of prompts with answers and, if known, of normalised prompts.
        rows, trained: the index in its split of each validation row and of each training row.
    """
    same_prompt, same_pair, *nearly = (found_in(*hashes) for hashes in zip(validation, train, strict=True))
    codes: list[tuple[str, Any]] = [("D404", same_pair), ("D406", np.where(same_pair < 0, same_prompt, -1))]
    codes += [("D405", np.where(same_prompt < 0, loose, -1)) for loose in nearly]
    for code, like in codes:
        for row in np.flatnonzero(like >= 0):
            findings.add(code, "validation", int(rows[row]), like=("train", int(trained[like[row]])))
