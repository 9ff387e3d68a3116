"""Finds names in answers that are most likely misspelt, being rare beside one spelt alike: labels, and keys of JSON."""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from difflib import SequenceMatcher

from accel_sft.tools.check.findings import Findings
from accel_sft.tracking.labels import LONGEST_LABEL, are_labels

_TIMES, _FEWEST_LETTERS = 10, 5
"""How many times as often the other name occurs, and its fewest letters, for a slip: Iran is not Iraq."""
_LONGEST = 1 << 16
"""Maximum number of characters of an answer that is parsed."""
_MOST = 1000
"""With more distinct names than this, they are taken for content, such as persons' names, and nothing is reported."""
_NAMED, _COUNTED = 200, 12
"""Maximum number of rows that are named for one name, and of labels whose rows are counted in a line."""
_SENTENCE = ".,;:!?…。，！？、；：·()[]{}（）【】《》—–"
_QUOTES = dict.fromkeys(map(ord, "'\"`‘’“”«»「」『』"))
_MARKS = re.compile(rf"(?<!\d)[{re.escape(_SENTENCE)}]|[{re.escape(_SENTENCE)}](?!\d)")


class AnswerNames:
    """Counts answers, which may be labels, and the keys of those that are JSON objects, such as entity types."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {"D214": Counter(), "D216": Counter()}
        self._rows: dict[tuple[str, str], list[tuple[str, int]]] = defaultdict(list)

    def add(self, split: str, index: int, answer: str) -> None:
        """Count an example's answer, and its keys if it is a JSON object."""
        self._count("D216", split, index, [answer.strip()[: LONGEST_LABEL + 1]])
        if answer.startswith("{") and len(answer) <= _LONGEST:
            with contextlib.suppress(ValueError, RecursionError):
                self._count("D214", split, index, json.loads(answer))

    def _count(self, code: str, split: str, index: int, names: Iterable[str]) -> None:
        for name in names if len(self._counts[code]) <= _MOST else ():
            self._counts[code][name] += 1
            if len(self._rows[code, name]) < _NAMED:
                self._rows[code, name].append((split, index))

    def report(self, found: Findings) -> list[str]:
        """Report the rows of names that are most likely misspelt; return a line that counts the labels, if any."""
        labels = are_labels(self._counts["D216"])
        for code, counts in self._counts.items():
            ranked = counts.most_common() if len(counts) <= _MOST and (labels or code == "D214") else []
            for place, (name, count) in enumerate(ranked):
                for other, times in ranked[:place]:
                    if (code == "D216" or times >= _TIMES * count) and _misspelt(name, other, times / count):
                        detail = f"{name!r} stands {count:,} time{'s' * (count != 1)}, {other!r} {times:,} times"
                        for split, index in self._rows.pop((code, name), ()):
                            found.add(code, split, index, detail)
        named = [f"{name} {count:,}" for name, count in self._counts["D216"].most_common()]
        rarest = f", ..., {named[-1]}" if len(named) > _COUNTED else ""
        return [f"{len(named)} labels: {', '.join(named[:_COUNTED])}{rarest}"] if labels else []


def _misspelt(name: str, other: str, times: float) -> bool:
    """Whether a name is the other but for case, white space and punctuation or, if rare, for one letter or the order of
    letters. The first letter and digits are meant: typical and atypical, class 1 and class 2 are two labels."""
    one, two = normalised(name), normalised(other)
    if one == two or times < _TIMES or len(two) < _FEWEST_LETTERS or one[:1] != two[:1]:
        return one == two != ""
    codes = SequenceMatcher(None, one, two).get_opcodes()
    edits = [(one[a:b], two[c:d]) for kind, a, b, c, d in codes if kind != "equal"]
    slip = sorted(one) == sorted(two) or (len(edits) == 1 and max(map(len, edits[0])) == 1)
    # a character of Chinese is a word, and is no lower-case letter
    return slip and all(mark.islower() or mark in " _-'" for mark in "".join(map("".join, edits)))


def normalised(text: str) -> str:
    """`text` without case, quotes, punctuation and repeated white space; numbers keep their points and commas."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_QUOTES)
    return " ".join(_MARKS.sub(" ", text).split())
