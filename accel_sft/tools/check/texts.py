"""Reads every prompt and answer once, and reports faulty texts and misspelt labels."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import Conversation, conversation
from accel_sft.chat.pictures import shown
from accel_sft.io.text import MISSING_VALUES
from accel_sft.results.labels import LONGEST_LABEL, are_labels
from accel_sft.tools.check.findings import Findings

DAMAGED = re.compile("[\ufeff\ufffd\x00-\x08\x0e-\x1f\x7f-\x9f]|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac")
"""Signs of a wrong encoding: the replacement character, control characters, and UTF-8 read as Latin-1 or cp1252."""
_TIMES, _FEWEST_LETTERS = 10, 5
"""A label can only misspell another label that has `_TIMES` times its count and enough letters (Iran is not Iraq)."""
_MOST_LABELS = 1000
"""If there are more different answers than this, answers do not count as labels, and no label is reported."""
_NAMED, _COUNTED = 200, 12
"""Maximum number of rows that are named for one label, and maximum number of labels in the summary line."""
_SENTENCE = ".,;:!?…。，！？、；：·()[]{}（）【】《》—–"
_QUOTES = dict.fromkeys(map(ord, "'\"`‘’“”«»「」『』"))
_MARKS = re.compile(rf"(?!!=|(?<!\w)\.\d)(?:(?<!\d)[{re.escape(_SENTENCE)}]|[{re.escape(_SENTENCE)}](?!\d))")


class Labels:
    """Counts answers. If the answers are labels, reports rare labels that are spelt almost like a frequent label (most
    likely misspelt), and labels that are trained on but never tested."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._tested: set[str] = set()
        self._rows: dict[str, list[tuple[str, int]]] = defaultdict(list)

    def add(self, split: str, index: int, answer: str) -> None:
        """Count an example's answer."""
        label = answer.strip()[: LONGEST_LABEL + 1]
        if len(self._counts) <= _MOST_LABELS:
            self._counts[label] += 1
            if split == "validation":
                self._tested.add(label)
            if len(self._rows[label]) < _NAMED:
                self._rows[label].append((split, index))

    def report(self, findings: Findings, *, is_complete: bool = True) -> list[str]:
        """Report rows whose label is most likely misspelt. If all validation rows were added (`is_complete`), also
        report labels that validation never tests. Return a line with the labels' counts; [] if there are no labels."""
        if not are_labels(self._counts):
            return []
        ranked = self._counts.most_common()
        for place, (label, count) in enumerate(ranked):
            for other, times in ranked[:place]:
                if _misspelt(label, other, times / count):
                    detail = f"{label!r} occurs {count:,} time{'s' * (count != 1)}, {other!r} {times:,} times"
                    for split, index in self._rows.pop(label, ()):
                        findings.add("D216", split, index, detail)
        for label, count in ranked if self._tested and is_complete else ():
            if label not in self._tested and self._rows.get(label) and label[:1] not in ("{", "["):  # JSON is no label
                detail = f"{label!r} occurs {count:,} time{'s' * (count != 1)} in train, never in validation"
                findings.add("D218", *self._rows[label][0], detail)
        named = [f"{label} {count:,}" for label, count in ranked]
        rarest = f", ..., {named[-1]}" if len(named) > _COUNTED else ""
        return [f"{len(named)} labels: {', '.join(named[:_COUNTED])}{rarest}"]


def _misspelt(label: str, other: str, times: float) -> bool:
    """Whether two labels differ only in case, white space or punctuation. If `label` is rare, they may also differ in
    one letter or in the order of letters, but not in the first letter or in a digit: class 1 and class 2 are different
    labels."""
    one, two = normalised(label), normalised(other)
    if one == two or times < _TIMES or len(two) < _FEWEST_LETTERS or one[:1] != two[:1]:
        return one == two != ""
    codes = SequenceMatcher(None, one, two).get_opcodes()
    edits = [(one[a:b], two[c:d]) for kind, a, b, c, d in codes if kind != "equal"]
    slip = sorted(one) == sorted(two) or (len(edits) == 1 and max(map(len, edits[0])) == 1)
    # a Chinese character is a word and not lower-case: labels that differ in one are never misspellings
    return slip and all(mark.islower() or mark in " _-'" for mark in "".join(map("".join, edits)))


def normalised(text: str) -> str:
    """`text` without case, quotes, punctuation and repeated white space; marks in numbers and operators stay."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_QUOTES)
    return " ".join(_MARKS.sub(" ", text).split())


def read_texts(task: Task, examples: Sequence[Any], split: str, labels: Labels, findings: Findings) -> np.ndarray:
    """Read every example's conversation, report the faults of its texts, and add the answers to `labels`. Return a mask
    of the examples that can be read."""
    readable = np.ones(len(examples), dtype=bool)
    for index in range(len(examples)):
        try:
            chat = conversation(task, examples, split, index)
        except UserError as error:
            findings.add("D201", split, index, without_index(str(error), split, index))
            readable[index] = False
            continue
        for code, detail in _faults(chat).items():
            findings.add(code, split, index, detail)
        labels.add(split, index, chat.target)
    return readable


def _faults(chat: Conversation) -> dict[str, str]:
    """Return the faults of an example's texts: maps a code to a detail about the fault's first occurrence."""
    faults: dict[str, str] = {}
    for one in chat.by_answer():
        target = one.target
        if not (target.strip() or one.calls):
            faults.setdefault("D206", f"asked: {shortened(shown(one.turns[-1]['content']))}" if one.turns else "")
        elif not one.turns:
            continue
        elif target != target.strip():
            faults.setdefault("D211", repr(shortened(target)))
        if not any(turn["content"].strip() for turn in one.turns if turn["role"] != "system"):
            faults.setdefault("D207", f"answer: {shortened(target)}")
    for turn in (*chat.turns, chat.answer):
        text = turn["content"].strip()
        if (text.rpartition("\n")[2].strip() if turn["role"] == "user" else text) in MISSING_VALUES:
            faults.setdefault("D217", f"{turn['role']}: {shortened(text)}")
    for text in chat.texts():
        if not (text.isascii() and text.isprintable()) and (damage := DAMAGED.search(text)):
            faults["D210"] = around(text, damage)
            break
    return faults


def shortened(text: str, length: int = 48) -> str:
    """The beginning of a text."""
    return text if len(text) <= length else text[:length] + "..."


def around(text: str, match: re.Match[str], length: int = 24) -> str:
    """The matched text with `length` characters before and after it."""
    begin, end = max(match.start() - length, 0), match.end() + length
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def without_index(message: str, split: str, index: int) -> str:
    """The message without the example's number and place at its beginning: the finding already names the row."""
    return re.sub(rf"^{split} example {index}( \(.*?\))?: ", "", message).removeprefix(f"{split}: ")
