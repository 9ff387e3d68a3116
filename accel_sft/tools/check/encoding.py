"""Tokenizes a split as training does, but reports each row that would stop training, and leaves it out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.chat.conversation import conversation
from accel_sft.chat.dropped import AnswerDropped, NotAPrefix, TextDropped
from accel_sft.chat.encoded import EMPTY_ANSWER, NO_PROMPT, NOTHING_TO_LEARN, Encoding
from accel_sft.chat.template import Rejected
from accel_sft.data.token_store import StoredEncoding
from accel_sft.data.tokenization import SplitEncoder
from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.reading import Selection, selected
from accel_sft.tools.check.texts import without_index

_CODES = {Rejected: "D202", NotAPrefix: "D203", AnswerDropped: "D204", TextDropped: "D213"}
_MOST_REFUSED = 200
"""Number of refused rows at which a split is given up: with so many, chat template and task do not fit each other."""
_BLOCK = 512
"""Rows tokenized together in the search for refused rows; a block that has one is halved until the row is found."""
_MEASURED = 256
"""Maximum number of rows above --max-length whose tokens are counted, to say which --max-length would keep them."""
_TOKENIZED = 1 << 20
"""If one of these rows has more characters, no tokens are counted: tokenizing a text of 10 MB takes gigabytes."""


def encode_split(
    encode: SplitEncoder, examples: Sequence[Any], good: np.ndarray, split: str, found: Findings, truncation: str
) -> tuple[StoredEncoding | None, np.ndarray]:
    """Tokenize the examples for which `good` is true; return their tokens, and the index of each in the split.

    Args:
        truncation: the value of `--truncation`; even if it is "error", `encode` drops rows that are too long.
    Returns:
        None in place of the tokens if no example is left, too many are refused, or training refuses the whole split.
    """
    try:
        chosen = selected(examples, good)
        encoding = encode(chosen, split)
    except UserError:
        left_out, refused = _refused_one_by_one(encode, examples, np.flatnonzero(good), split)
        for index, why in refused.items():
            found.add(_CODES.get(type(why), "D205"), split, index, without_index(str(why), split, index))
        if len(refused) >= _MOST_REFUSED:
            found.finding("D205", split).also = f"{len(refused)} rows are refused; the others were not tokenized"
            return None, np.zeros(0, dtype=np.int64)
        good = good.copy()
        good[list(refused)] = False
        chosen = selected(examples, good)
        try:
            if not refused:
                raise
            encoding = encode(chosen, split)
        except UserError as error:
            _report_left_out(encode, examples, left_out, np.arange(len(examples)), found, truncation)
            nothing = good.sum() == sum(map(len, left_out.left_out.values()))
            finding = found.finding("D307" if nothing else "D205", split)
            finding.also = "" if nothing else error.problems[-1]
            return None, np.zeros(0, dtype=np.int64)
    indices = chosen.indices if isinstance(chosen, Selection) else np.arange(len(examples))
    _report_left_out(encode, examples, encoding, indices, found, truncation)
    return encoding, indices


def _refused_one_by_one(
    encode: SplitEncoder, examples: Sequence[Any], indices: np.ndarray, split: str
) -> tuple[Encoding, dict[int, UserError]]:
    """Return the rows left out or truncated, and the error of each row that would stop training, both by index."""
    left_out = Encoding(split)
    refused: dict[int, UserError] = {}

    def look(some: list[int]) -> None:
        if len(refused) >= _MOST_REFUSED:
            return
        seen = Encoding(split)
        try:
            for part in encode.parts(examples, some, split):
                seen.note(part)
        except UserError as error:
            if len(some) == 1:
                refused[some[0]] = error
                return
            look(some[: len(some) // 2])
            look(some[len(some) // 2 :])
            return
        left_out.note(seen)

    for begin in range(0, len(indices), _BLOCK):
        look(indices[begin : begin + _BLOCK].tolist())
    return left_out, refused


def _report_left_out(
    encode: SplitEncoder,
    examples: Sequence[Any],
    encoding: Encoding,
    indices: np.ndarray,
    found: Findings,
    truncation: str,
) -> None:
    """Report the rows that were left out or truncated, without empty answers, which `read_texts` has reported."""
    split, rules = encoding.split, encode.rules
    for reason, rows in encoding.left_out.items():
        code = {rules.too_long: "D301", NOTHING_TO_LEARN: "D303", NO_PROMPT: "D309"}.get(reason, "D205")
        for row in rows if reason != EMPTY_ANSWER else ():
            grade = "error" if code == "D301" and truncation == "error" else None
            found.add(code, split, int(indices[row]), reason if code == "D205" else "", grade=grade)
    for row in encoding.cut:
        found.add("D302", split, int(indices[row]))
    too_long = [int(indices[row]) for row in (*encoding.left_out.get(rules.too_long, ()), *encoding.cut)]
    if too_long:
        code = "D302" if encoding.cut else "D301"
        some = sorted(too_long)[:_MEASURED]
        found.finding(code, split).also = _length_needed(encode, examples, some, split, len(too_long))


def _length_needed(encode: SplitEncoder, examples: Sequence[Any], some: list[int], split: str, count: int) -> str:
    which = "the longest" if len(some) == count else f"the longest of the first {len(some)}"
    chats = (conversation(encode.task, examples, split, index) for index in some)
    characters = max(sum(map(len, chat.texts())) for chat in chats)
    if characters > _TOKENIZED:
        return f"{which} has {characters:,} characters"
    rules = dataclasses.replace(encode.rules, max_length=1 << 40, truncation="drop")
    parts = encode.parts(examples, some, split, rules)
    longest = max(len(each.input_ids) for part in parts for each in part.kept)
    return f"{which} has {longest:,} tokens"
