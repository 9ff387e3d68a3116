"""Finds rows that repeat each other, within a split and between splits, by hashes of prompts and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from accel_sft.tools.check.findings import Findings
from accel_sft.tools.check.texts import Texts

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
