"""Compares a generated answer with the row's answer, by the metric that --metric names."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import regex

from accel_sft import UserError
from accel_sft_chat.messages import Turn
from accel_sft_chat.values import functions_in

# a token is a word, or a character in scripts that put no blanks between words (Han, kana, Hangul, Thai)
_SPELT = "\u0e00-\u0e7f\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff"
_LETTER = rf"[[\p{{L}}\p{{N}}]--[{_SPELT}]]"
_ANY_LETTER = r"[\p{L}\p{N}_]"
# a word includes the signs that distinguish -1 from 1, 10% from 10, C++ and C# from C, and A+ and A- from A
_SIGNS = rf"(?:[+#%]+(?![_{_LETTER}])|(?<=(?<!{_ANY_LETTER}){_ANY_LETTER})-(?!{_ANY_LETTER}|-))"
_NEGATIVE = rf"(?:(?<![_{_LETTER}])(?<!-)-(?=\.?\d))?(?:(?<!{_ANY_LETTER})\.(?=\d))?"
# * and / between blanks are operators, but a * that begins a line is a bullet; a dash between words is not an operator
_OPERATORS = r"!=+|[<>=]+|(?<=\d )-(?= \d)|(?<=\S[ \t]+|\()[*\/]+(?![^\s),;])|(?<![\w!])!(?=[\w(])"
# a word keeps its combining marks (vowels of Indic scripts, harakat), a number keeps the marks inside it (1.5, 12:30)
_WORD = rf"{_LETTER}(?:{_LETTER}|\p{{M}})*"
_NUMBER = rf"{_NEGATIVE}{_WORD}(?:(?<=\d)[.,\/:\-](?=\d){_WORD})*{_SIGNS}?"
_TOKEN = regex.compile(rf"[{_SPELT}]|{_NUMBER}|{_OPERATORS}|[\p{{Sm}}\p{{Sc}}\p{{So}}]", regex.VERSION1)
_THOUGHT = re.compile(r"\s*<think>.*?</think>\s*", re.DOTALL)
_FENCE = re.compile(r"\s*```[a-z]*\n(.*?)\n?```\s*", re.DOTALL)
_TAGS = re.compile(r"</?tool_calls?>|\[/?TOOL_CALLS?\]|<\|/?tool_calls?(_begin|_end|▁begin|▁end)?\|>", re.IGNORECASE)


class Metric(NamedTuple):
    """A way to compare answers.

    Attributes:
        key: the score that decides which checkpoint is best.
        score: takes the row's answer and the generated answer, and returns all scores.
    """

    key: str
    score: Callable[[str, str], dict[str, float]]


def exact(expected: str, text: str) -> dict[str, float]:
    """Whether the texts are equal, apart from white space around them."""
    return {"exact_match": float(expected.strip() == text.strip())}


def f1(expected: str, text: str) -> dict[str, float]:
    """The F1 of words, each counted as often as it occurs. It ignores case, and punctuation that is not part of a word.

    This is SQuAD's F1, except that articles count too. If a text has no words, only an exact match counts.
    """
    wanted, given = (Counter(_tokens(each)) for each in (expected, text))
    if not wanted or not given:
        return {"token_f1": float(expected.strip() == text.strip()), **exact(expected, text)}
    same = (wanted & given).total()
    return {"token_f1": 2 * same / (wanted.total() + given.total()), **exact(expected, text)}


def chrf(expected: str, text: str) -> dict[str, float]:
    """sacrebleu's chrF (https://aclanthology.org/W15-3049), from 0 to 1: an F-score of character n-grams."""
    try:
        import sacrebleu
    except ImportError:
        raise UserError("--metric chrf: needs sacrebleu, which is not installed; pip install sacrebleu") from None
    if not expected.strip() or not text.strip():
        return {"chrf": float(expected.strip() == text.strip())}
    return {"chrf": sacrebleu.sentence_chrf(text, [expected]).score / 100}


def json_equal(expected: str, text: str) -> dict[str, float]:
    """Whether both texts are the same JSON, in any order of keys, with or without a code fence around it."""
    wanted, given = _value(expected), _value(text)
    same = wanted is not _NO_JSON and given is not _NO_JSON and _canonical(wanted) == _canonical(given)
    return {"json_equal": float(same), "json_valid": float(given is not _NO_JSON)}


def matching(pattern: re.Pattern[str]) -> Callable[[str, str], dict[str, float]]:
    """A score: whether the last match of `pattern` (its groups, if it has any) is equal in both answers."""

    def score(expected: str, text: str) -> dict[str, float]:
        wanted, given = (_last(pattern, each) for each in (expected, text))
        return {"regex_match": float(wanted is not None and wanted == given), "regex_found": float(given is not None)}

    return score


UNANSWERED = ("loss", "perplexity")
"""Names of the metrics for which no answers are generated."""


def loss_only(expected: str, text: str) -> dict[str, float]:
    """No score: the validation loss decides."""
    return {}


METRICS = {
    "f1": Metric("token_f1", f1),
    "exact": Metric("exact_match", exact),
    "accuracy": Metric("exact_match", exact),  # the name that many people look for
    "chrf": Metric("chrf", chrf),
    "json": Metric("json_equal", json_equal),
    "regex": Metric("regex_match", exact),
    "loss": Metric("eval_loss", loss_only),
    "perplexity": Metric("perplexity", loss_only),
}


def comparable(turn: Turn) -> str:
    """An answer's text without its thinking, followed by its tool calls as `comparable_text` writes them."""
    return _with_calls(without_thinking(turn["content"]), [call["function"] for call in turn.get("tool_calls", ())])


def comparable_text(text: str) -> str:
    """A generated text with its tool calls in one form, however the model's template writes them."""
    calls, rest, at = [], [], 0
    for begin, end, function in functions_in(text):
        rest.append(text[at:begin])
        calls.append(function)
        at = end
    return _with_calls(_TAGS.sub("", "".join([*rest, text[at:]])).strip(), calls) if calls else text


def without_thinking(text: str) -> str:
    """A text without the thinking at its beginning."""
    thought = _THOUGHT.match(text)
    return text[thought.end() :] if thought else text


def _with_calls(text: str, calls: list[dict[str, Any]]) -> str:
    lines = [f"{call['name']}({_canonical(call['arguments'])})" for call in calls]
    return "\n".join([text, *lines] if text else lines) if lines else text


def _tokens(text: str) -> list[str]:
    text = unicodedata.normalize("NFC", text.casefold())
    return _TOKEN.findall(re.sub(r"\s+%", "%", text).replace("\u2212", "-"))


_NO_JSON = object()


def _value(text: str) -> Any:
    fenced = _FENCE.fullmatch(text)
    try:
        return json.loads(fenced[1] if fenced else text)
    except (ValueError, RecursionError):
        return _NO_JSON


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


def _last(pattern: re.Pattern[str], text: str) -> tuple[str | None, ...] | None:
    found = None
    for match in pattern.finditer(text):
        found = match.groups() or (match[0],)
    return found
