"""Reads and checks rows in the form of CLUENER 2020 (https://github.com/CLUEbenchmark/CLUENER2020)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from accel_sft import RowProblem, UserError, read_rows
from accel_sft_ner.sentences import Sentence

_MAX_SHOWN = 5
"""Maximum number of problems of a row, or of shared sentences, that an error names."""


def read(path: str, split: str = "train") -> Sequence[Sentence]:
    """The sentences of a JSONL file, a JSON array or a folder's split. Types may have any names, not only CLUENER's.

    Raises:
        UserError: names file, line and field of every row that is not
            {"text": "...", "label": {type: {surface: [[first, last], ...]}}} with text[first : last + 1] == surface.
    """
    return read_rows(path, parse, split=split)


def read_unseen(path: str, validation: Any) -> Sequence[Sentence]:
    """Read sentences to train on, like `read`, and refuse those that are in `validation`.

    Parsing does this check, so it runs once for each file.

    Raises:
        UserError: as in `read`, or with the first few sentences that are in both files.
    """
    texts = frozenset(sentence.text for sentence in validation)
    try:
        return read_rows(path, functools.partial(_parse_unseen, texts))
    except UserError:
        refuse_overlap(read(path), validation)  # if the rows themselves are wrong, `read` raises first
        raise


def _parse_unseen(texts: frozenset[str], row: dict[str, Any]) -> Sentence:
    sentence = parse(row)
    if sentence.text in texts:
        raise RowProblem("text", f"a sentence that --validation-file does not have, got {_short(sentence.text)}")
    return sentence


def parse(row: dict[str, Any]) -> Sentence:
    """One row as a sentence; keys other than `text` and `label` are ignored.

    Raises:
        ValueError: the row is malformed; the message lists its first few problems on one line.
    """
    problems = _problems(row)
    if problems:
        shown = [str(problem) for problem in problems[:_MAX_SHOWN]]
        rest = len(problems) - len(shown)
        raise ValueError("; ".join(shown) + (f"; and {rest} more in this row" if rest else ""))
    return Sentence(row["text"], row["label"])


def refuse_overlap(train: Any, validation: Any) -> None:
    """Raise UserError if validation sentences are also trained on; both arguments are what `read` returns."""
    first_at: dict[str, int] = {}
    for index, sentence in enumerate(train):
        first_at.setdefault(sentence.text, index)
    shared = [index for index, sentence in enumerate(validation) if sentence.text in first_at]
    if not shared:
        return
    lines = []
    for index in shared[:_MAX_SHOWN]:
        text = validation[index].text
        (there,), (here,) = train.places([first_at[text]]), validation.places([index])
        lines.append(f"{here}: {_short(text)} is also trained on ({there})")
    raise UserError(
        f"--validation-file: {len(shared)} of {len(validation)} sentences are also trained on, which raises the "
        "metric; take them out of one file, or add --allow-overlap",
        *lines,
    )


def _problems(row: dict[str, Any]) -> list[RowProblem]:
    text, label = row.get("text"), row.get("label")
    found = []
    if not isinstance(text, str) or not text.strip():
        found.append(RowProblem("text", f"a sentence (string), got {_short(text, 'text' in row)}"))
        text = None
    if not isinstance(label, dict):
        expected = "an object {type: {surface: [[first, last], ...]}}"
        found.append(RowProblem("label", f"{expected}, got {_short(label, 'label' in row)}"))
        return found
    for kind, surfaces in label.items():
        if not kind.strip():
            found.append(RowProblem("label", "a name for each type, got an empty one"))
        if not isinstance(surfaces, dict):
            expected = "an object {surface: [[first, last], ...]}"
            found.append(RowProblem(f"label.{kind}", f"{expected}, got {_short(surfaces)}"))
            continue
        for surface, spans in surfaces.items():
            found += _span_problems(f"label.{kind}.{surface}", surface, spans, text)
    return found


def _span_problems(field: str, surface: str, spans: Any, text: str | None) -> list[RowProblem]:
    if not isinstance(spans, list) or not spans:
        return [RowProblem(field, f"a list of [first, last] with at least one, got {_short(spans)}")]
    found, seen = [], set()
    for span in spans:
        if not (isinstance(span, list) and len(span) == 2 and all(type(offset) is int for offset in span)):
            found.append(RowProblem(field, f"[first, last] as two integers, got {_short(span)}"))
            continue
        first, last = span
        if (first, last) in seen:
            found.append(RowProblem(field, f"each span once, got {span} twice"))
        elif text is not None:
            if not 0 <= first <= last < len(text):
                found.append(RowProblem(field, f"0 <= first <= last < {len(text)} (the text's length), got {span}"))
            elif last - first + 1 != len(surface) or not text.startswith(surface, first):
                there = f"got {_short(text[first : min(last + 1, first + 41)])} at {span} (both ends inclusive)"
                found.append(RowProblem(field, f"the span to hold {_short(surface)}, {there}"))
        seen.add((first, last))
    return found


def _short(value: Any, present: bool = True) -> str:
    if not present:
        return "nothing (the field is missing)"
    shown = repr(value[:40] if isinstance(value, str) else value)  # a text may be as long as it likes
    return shown if len(shown) <= 40 else shown[:37] + "..."
