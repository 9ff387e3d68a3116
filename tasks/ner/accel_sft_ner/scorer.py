"""The one scorer of entity answers: what counts as an entity, and how counts become precision, recall and F1.

**Reading an answer.** The whole generated text, apart from white space around it, must be one JSON value; it is never
evaluated as code. NaN, Infinity, a key twice in one object, a lone surrogate in a key, and nesting or numbers too large
for the parser are not valid. An invalid answer has no entities. `valid_json` is the share of valid answers;
`valid_shape` is the share that are also an object of type -> surface -> non-empty list of [first, last] integers.
Valid JSON of a different shape counts as far as it fits: an answer {type: {surface: ...}} predicts that entity,
whatever its spans look like; anything else predicts nothing.

**Counting.** An entity is the pair (type, surface), compared character by character, and counts once in an answer.
True positives are in gold and answer, false positives only in the answer, false negatives only in gold. *Strict*
counts (type, surface, span) instead, each span once; if an answer gives a surface malformed spans, or none, these
together are one false positive. *Unseen* counts only entities, in gold and in answers, whose surface is not an
entity of any type in the training data; so an invented surface is a false positive there.

**Metrics.** Counts are first summed over all examples. precision = tp / (tp + fp), recall = tp / (tp + fn),
f1 = 2 tp / (2 tp + fp + fn), each 0 if its denominator is 0. Micro averages pool the types; `macro_*` is the mean over
the types that occur in gold (an invented type lowers micro precision, but not macro). `unseen_entities` is the number
of gold entities that `unseen_f1` is about; if it is 0, `unseen_f1` says nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from typing import Any

Score = dict[str, Any]
"""{"valid_json": 0 | 1, "valid_shape": 0 | 1, "entity": {type: [tp, fp, fn]}, "strict": like "entity", "unseen":
[tp, fp, fn]}"""

_INVALID = object()


def score(gold: dict[str, Any], text: str, training_surfaces: Collection[str]) -> Score:
    """The counts of one generated answer, JSON-able.

    Args:
        gold: type -> surface -> [[first, last], ...].
        text: anything a model may generate.
        training_surfaces: surfaces of all entities in the training data.
    """
    answer = _parse(text)
    gold_spans, spans = _spans(gold), _spans(answer)
    gold_entities = {entity[:2] for entity in gold_spans}
    entities = {entity[:2] for entity in spans}
    unseen = [{entity for entity in each if entity[1] not in training_surfaces} for each in (gold_entities, entities)]
    return {
        "valid_json": int(answer is not _INVALID),
        "valid_shape": int(answer is not _INVALID and _is_label(answer)),
        "entity": _by_type(gold_entities, entities),
        "strict": _by_type(gold_spans, spans),
        "unseen": _counts(*unseen),
    }


def aggregate(scores: Sequence[Score]) -> dict[str, float]:
    """Every metric from the counts of all examples; empty without examples."""
    if not scores:
        return {}
    metrics = {key: sum(each[key] for each in scores) / len(scores) for key in ("valid_json", "valid_shape")}
    for level, prefix in (("entity", ""), ("strict", "strict_")):
        by_type: dict[str, list[int]] = {}
        for each in scores:
            for kind, counts in each[level].items():
                by_type[kind] = _add(by_type.get(kind, [0, 0, 0]), counts)
        micro = _rates(_total(by_type.values()))
        # Averaged over gold's types only, so that the denominator does not depend on types that a model invents.
        per_type = [_rates(counts) for counts in by_type.values() if counts[0] + counts[2]]
        for name, value in micro.items():
            metrics[prefix + name] = value
            metrics[f"{prefix}macro_{name}"] = sum(rates[name] for rates in per_type) / max(len(per_type), 1)
    unseen = _total(each["unseen"] for each in scores)
    metrics |= {f"unseen_{name}": value for name, value in _rates(unseen).items()}
    metrics["unseen_entities"] = unseen[0] + unseen[2]
    return metrics


def _parse(text: str) -> Any:
    try:
        return json.loads(text.strip(), object_pairs_hook=_object, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return _INVALID


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    # Types become keys of the score, and a lone surrogate could not be written to any UTF-8 file.
    if len(found) < len(pairs) or any(re.search("[\ud800-\udfff]", key) for key in found):
        raise ValueError("a key twice, or one that is not text")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(offset) is int for offset in value)


def _is_label(answer: Any) -> bool:
    return isinstance(answer, dict) and all(
        isinstance(surfaces, dict)
        and all(isinstance(spans, list) and spans and all(map(_is_span, spans)) for spans in surfaces.values())
        for surfaces in answer.values()
    )


def _spans(answer: Any) -> set[tuple[str, str, tuple[int, int] | None]]:
    """(type, surface, span) of each part of the answer that fits; None stands for a malformed or missing span."""
    found = set()
    for kind, surfaces in answer.items() if isinstance(answer, dict) else ():
        for surface, spans in surfaces.items() if isinstance(surfaces, dict) else ():
            listed = spans if isinstance(spans, list) and spans else [None]
            found |= {(kind, surface, (span[0], span[1]) if _is_span(span) else None) for span in listed}
    return found


def _counts(gold: set, answered: set) -> list[int]:
    """[true positives, false positives, false negatives]"""
    return [len(gold & answered), len(answered - gold), len(gold - answered)]


def _by_type(gold: set, answered: set) -> dict[str, list[int]]:
    return {
        kind: _counts({each for each in gold if each[0] == kind}, {each for each in answered if each[0] == kind})
        for kind in sorted({each[0] for each in gold | answered})
    }


def _add(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _total(all_counts: Any) -> list[int]:
    total = [0, 0, 0]
    for counts in all_counts:
        total = _add(total, counts)
    return total


def _rates(counts: Sequence[int]) -> dict[str, float]:
    tp, fp, fn = counts

    def ratio(part: int, whole: int) -> float:
        return part / whole if whole else 0.0

    return {
        "precision": ratio(tp, tp + fp),
        "recall": ratio(tp, tp + fn),
        "f1": ratio(2 * tp, 2 * tp + fp + fn),
    }
