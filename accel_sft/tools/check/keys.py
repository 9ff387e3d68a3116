"""Finds keys of JSON answers that are most likely misspelt: rare, and spelt nearly like a frequent key."""

from __future__ import annotations

import difflib
import json
from collections import Counter

from accel_sft.tools.check.findings import Findings

_TIMES = 100
"""A key is rare beside another key that occurs at least this many times as often."""
_NEAR = 0.8
"""Two keys are spelt nearly alike if their similarity (difflib's ratio, from 0 to 1) is at least this."""
_LONGEST = 1 << 16
"""Maximum number of characters of an answer that is parsed."""
_MOST_KEYS = 1000
"""With more distinct keys than this, keys are taken for content, such as persons' names, and nothing is reported."""
_NAMED = 20
"""Maximum number of rows that are named for one key."""


class AnswerKeys:
    """Counts the keys of answers that are JSON objects, such as entity types, and remembers each key's first rows."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._rows: dict[str, list[tuple[str, int]]] = {}

    def add(self, split: str, index: int, answer: str) -> None:
        """Count the keys of an example's answer, if it is a JSON object."""
        if not answer.startswith("{") or len(answer) > _LONGEST or len(self._counts) > _MOST_KEYS:
            return
        try:
            keys = json.loads(answer).keys()
        except (ValueError, RecursionError):
            return
        self._counts.update(keys)
        for key in keys:
            if len(rows := self._rows.setdefault(key, [])) < _NAMED:
                rows.append((split, index))

    def report(self, found: Findings) -> None:
        """Report the rows of keys that are most likely misspelt."""
        if len(self._counts) > _MOST_KEYS:
            return
        for key, count in self._counts.items():
            frequent = [other for other, times in self._counts.items() if times >= _TIMES * count]
            if meant := next((other for other in frequent if _near(key, other)), None):
                detail = f"{key!r} stands {count:,} time{'s' * (count != 1)}, {meant!r} {self._counts[meant]:,} times"
                for split, index in self._rows[key]:
                    found.add("D214", split, index, detail)


def _near(key: str, other: str) -> bool:
    if sorted(key.casefold()) == sorted(other.casefold()):  # the same letters in another order or case
        return True
    return difflib.SequenceMatcher(None, key, other).ratio() >= _NEAR
