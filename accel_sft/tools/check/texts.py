"""Reads every prompt and answer once: reports faults of the text and misspelt labels, and hashes it to find repeats."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence
from difflib import SequenceMatcher
from typing import Any

import numpy as np

from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.control_tokens import ControlTokens
from accel_sft.chat.conversation import Conversation, Turn, conversation, divided
from accel_sft.chat.pictures import shown
from accel_sft.io.text import MISSING_VALUES
from accel_sft.results.labels import LONGEST_LABEL, are_labels
from accel_sft.tools.check.findings import Findings

DAMAGED = re.compile("[\ufeff\ufffd\x00-\x08\x0e-\x1f\x7f-\x9f]|[\u00c2\u00c3][\u0080-\u00bf]|\u00e2\u20ac")
"""Signs of a wrong encoding: the replacement character, control characters, and UTF-8 read as Latin-1 or cp1252."""
_TIMES, _FEWEST_LETTERS = 10, 5
"""How many times as often the other label occurs, and its fewest letters, for a slip: Iran is not Iraq."""
_MOST_LABELS = 1000
"""With more different answers than this, they are taken for content, and none is reported."""
_NAMED, _COUNTED = 200, 12
"""Maximum number of rows that are named for one label, and of labels whose rows are counted in a line."""
_SENTENCE = ".,;:!?…。，！？、；：·()[]{}（）【】《》—–"
_QUOTES = dict.fromkeys(map(ord, "'\"`‘’“”«»「」『』"))
_MARKS = re.compile(rf"(?!!=|(?<!\w)\.\d)(?:(?<!\d)[{re.escape(_SENTENCE)}]|[{re.escape(_SENTENCE)}](?!\d))")


@dataclasses.dataclass(frozen=True)
class Texts:
    """Facts about the texts of a split's examples: each array has one entry for each example.

    Attributes:
        prompts, pairs: hashes of the prompt, and of prompt and answer.
        loose_prompts, loose_pairs: hashes of the same texts, normalised.
        readable: False if the task fails on the example; then its hashes mean nothing.
        answered: False if the answer is empty.
    """

    prompts: np.ndarray
    pairs: np.ndarray
    loose_prompts: np.ndarray
    loose_pairs: np.ndarray
    readable: np.ndarray
    answered: np.ndarray

    @property
    def usable(self) -> np.ndarray:
        return self.readable & self.answered


class SpecialTokens:
    """Finds the tokenizer's special tokens in texts: only the chat template, or raw text for which they are tokens,
    should have them."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], as_text: bool = True) -> None:
        self._control = ControlTokens(tokenizer, as_text)
        self._ends = self._control.spelled(eos_ids)

    def faults(self, chat: Conversation) -> list[tuple[str, str]]:
        """Return code and surrounding text of one special token in the texts: the first that ends an answer (D209), or
        else the first of any kind (D208). The list is empty if the texts have no special token."""
        written = self._control.written(chat, self._ends) if chat.turns or self._control.as_text else None
        return [("D209" if written.ends_answer else "D208", around(written.text, written.match))] if written else []


class Labels:
    """Counts answers, and where they are labels, reports those most likely misspelt, rare beside one spelt alike, and
    those that are trained on and never tested."""

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
        """Report rows of labels that are most likely misspelt or, if the validation split `is_complete`, never
        tested; return a line that counts the labels, if any."""
        if not are_labels(self._counts):
            return []
        ranked = self._counts.most_common()
        for place, (label, count) in enumerate(ranked):
            for other, times in ranked[:place]:
                if _misspelt(label, other, times / count):
                    detail = f"{label!r} stands {count:,} time{'s' * (count != 1)}, {other!r} {times:,} times"
                    for split, index in self._rows.pop(label, ()):
                        findings.add("D216", split, index, detail)
        for label, count in ranked if self._tested and is_complete else ():
            if label not in self._tested and self._rows.get(label) and label[:1] not in ("{", "["):  # JSON is no label
                detail = f"{label!r} stands {count:,} time{'s' * (count != 1)} in train, never in validation"
                findings.add("D218", *self._rows[label][0], detail)
        named = [f"{label} {count:,}" for label, count in ranked]
        rarest = f", ..., {named[-1]}" if len(named) > _COUNTED else ""
        return [f"{len(named)} labels: {', '.join(named[:_COUNTED])}{rarest}"]


def _misspelt(label: str, other: str, times: float) -> bool:
    """Whether a label is the other but for case, white space and punctuation or, if rare, for one letter or the order
    of letters. The first letter and digits are meant: typical and atypical, class 1 and class 2 are two labels."""
    one, two = normalised(label), normalised(other)
    if one == two or times < _TIMES or len(two) < _FEWEST_LETTERS or one[:1] != two[:1]:
        return one == two != ""
    codes = SequenceMatcher(None, one, two).get_opcodes()
    edits = [(one[a:b], two[c:d]) for kind, a, b, c, d in codes if kind != "equal"]
    slip = sorted(one) == sorted(two) or (len(edits) == 1 and max(map(len, edits[0])) == 1)
    # a character of Chinese is a word, and is no lower-case letter
    return slip and all(mark.islower() or mark in " _-'" for mark in "".join(map("".join, edits)))


def normalised(text: str) -> str:
    """`text` without case, quotes, punctuation and repeated white space; numbers and operators keep their marks."""
    text = unicodedata.normalize("NFKC", text).casefold().translate(_QUOTES)
    return " ".join(_MARKS.sub(" ", text).split())


def read_texts(
    task: Task,
    examples: Sequence[Any],
    split: str,
    special: SpecialTokens,
    labels: Labels,
    findings: Findings,
    *,
    keeps_thinking: bool = False,
) -> Texts:
    """Read every example's conversation, and report the faults of its texts.

    Args:
        labels: counts the answers.
        keeps_thinking: whether `--thinking keep` is given, so that each answer should have thinking.
    """
    count = len(examples)
    hashes = np.zeros((4, count), dtype=np.uint64)
    readable, answered = np.ones(count, dtype=bool), np.ones(count, dtype=bool)
    for index in range(count):
        try:
            chat = conversation(task, examples, split, index)
            seen = "".join(f"\x1e{picture.digest}" for picture in chat.images)
        except UserError as error:
            findings.add("D201", split, index, without_index(str(error), split, index))
            readable[index] = False
            continue
        faults = _faults(chat, keeps_thinking)
        answered[index] = "D206" not in faults
        for code, detail in (*faults.items(), *special.faults(chat)):
            findings.add(code, split, index, detail)
        prompt = "\x1e".join(f"{turn['role']}\x1f{turn['content']}{_calls(turn)}" for turn in chat.turns) + seen
        prompt = prompt or chat.target  # raw texts never contradict each other
        labels.add(split, index, chat.target)
        target = chat.target + _calls(chat.answer)
        loose = normalised(prompt)
        texts = prompt, f"{prompt}\x1d{target}", loose, f"{loose}\x1d{normalised(target)}"
        hashes[:, index] = [hash64(text.encode()) for text in texts]
    prompts, pairs, loose_prompts, loose_pairs = hashes
    return Texts(prompts, pairs, loose_prompts, loose_pairs, readable, answered)


def _calls(turn: Turn) -> str:
    return json.dumps(turn["tool_calls"], sort_keys=True) if turn.get("tool_calls") else ""


def _faults(chat: Conversation, keeps_thinking: bool) -> dict[str, str]:
    """Return the faults of an example's texts by code, each with a detail about its first occurrence."""
    faults: dict[str, str] = {}
    for one in chat.by_answer():
        target = one.target
        if not (target.strip() or one.calls):
            faults.setdefault("D206", f"asked: {shortened(shown(one.turns[-1]['content']))}" if one.turns else "")
        elif not one.turns:
            continue
        elif target != target.strip():
            faults.setdefault("D211", repr(shortened(target)))
        if keeps_thinking and target.strip() and divided(one)[0] is None:
            faults.setdefault("D212", f"answer: {shortened(target)}")
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


def hash64(content: Any) -> int:
    """64 bits of BLAKE2 of bytes: among a billion different texts, the chance that any two collide is one in forty."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def shortened(text: str, length: int = 48) -> str:
    """The beginning of a text."""
    return text if len(text) <= length else text[:length] + "..."


def beginning_of(task: Task, examples: Sequence[Any], split: str, index: int) -> str:
    """The beginning of an example's last prompt message, or of a raw text; "" if the task fails on the example."""
    try:
        chat = conversation(task, examples, split, index)
    except UserError:
        return ""
    return shortened(shown([chat.answer, *chat.turns][-1]["content"]))


def around(text: str, match: re.Match[str], length: int = 24) -> str:
    """The matched text with `length` characters before and after it."""
    begin, end = max(match.start() - length, 0), match.end() + length
    return ("..." if begin else "") + text[begin:end] + ("..." if end < len(text) else "")


def without_index(message: str, split: str, index: int) -> str:
    """The message without the example's number and place at its beginning: the finding already names the row."""
    return re.sub(rf"^{split} example {index}( \(.*?\))?: ", "", message).removeprefix(f"{split}: ")
