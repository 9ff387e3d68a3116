"""Computes scores by label, and a confusion table of labels, if the expected answers are a few short texts."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from accel_sft.io.text import one_line

_MOST, LONGEST_LABEL, _COLUMNS, _FEW = 200, 60, 12, 10
"""Maximum numbers: of labels; of a label's characters; of labels in a confusion table; of labels if there are only
two examples per label on average (more labels need four)."""
_SHARES = ("precision", "recall", "f1")


def are_labels(counts: Mapping[str, int]) -> bool:
    """Whether answers are labels, that is, a few short texts that repeat; `counts` has how often each occurs."""
    total, short = sum(counts.values()), sum(n for text, n in counts.items() if 0 < len(text) <= LONGEST_LABEL)
    most = min(_MOST, max(total // 4, min(total // 2, _FEW)))
    return 1 < len(counts) <= most and short >= 0.9 * total


def label_scores(samples: Sequence[Mapping[str, Any]], main_metric: str) -> dict[str, Any]:
    """A result's `labels`, the most frequent first, and its `macro_f1`; {} unless the expected answers are labels.

    An answer that equals a label counts as that label. Any other answer counts as the expected label if its
    `main_metric` is 1, else as "" (no label). {} also if `main_metric` does not say which answers are right.
    """
    expected = Counter(str(sample["expected"]).strip() for sample in samples)
    answers: dict[str, Counter[str]] = {label: Counter() for label, _ in expected.most_common()}
    for sample in samples if are_labels(expected) else ():
        label, answer = (str(sample[key]).strip() for key in ("expected", "generated"))
        right = sample["scores"].get(main_metric)
        if right is None or (right != 1 and answer == label):
            return {}
        answers[label][answer if answer in answers else label if right == 1 else ""] += 1
    labels: dict[str, Any] = {}
    given = sum(answers.values(), Counter())
    for label, counts in answers.items():
        right, count, times = counts[label], expected[label], given[label]
        shares = right / max(times, 1), right / count, 2 * right / (times + count)  # as in scikit-learn
        labels[label] = {"examples": count, "answers": dict(counts), **dict(zip(_SHARES, shares, strict=True))}
    return {"labels": labels, "macro_f1": fmean(row["f1"] for row in labels.values())} if given else {}


def weakest_label(result: Mapping[str, Any]) -> str:
    """A line on a result's `labels`: their mean F1, and the label with the lowest recall."""
    labels = result["labels"]
    name = min(labels, key=lambda label: labels[label]["recall"])
    right, count = labels[name]["answers"].get(name, 0), labels[name]["examples"]
    return (
        f"labels    macro F1 is {result['macro_f1']:.3f} over {len(labels)} labels; {one_line(name)!r} has the lowest "
        f"recall, {right:,} of {count:,}; see report.md"
    )


def label_tables(labels: Any) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, header and rows of two tables, scores by label and confusion; [] if `labels` is malformed."""
    try:
        means = {share: fmean(row[share] for row in labels.values()) for share in _SHARES}
        counted = [(one_line(label), f"{row['examples']:,}", row) for label, row in labels.items()]
        every = [*counted, ("macro mean", "", means)]
        scores = [[label, count, *(f"{row[share]:.3f}" for share in _SHARES)] for label, count, row in every]
        confusion, names = [], [*labels][:_COLUMNS]
        for name in names:
            counts = [labels[name]["answers"].get(other, 0) for other in names]
            counts.append(sum(labels[name]["answers"].values()) - sum(counts))
            confusion.append([one_line(name), *(str(count or "") for count in counts)])
    except (AttributeError, KeyError, TypeError, ValueError):  # someone else's file
        return []
    title = "Answers by expected label" + f", the {_COLUMNS} most frequent" * (len(labels) > _COLUMNS)
    return [
        ("Scores by label", ["label", "examples", "precision", "recall", "F1"], scores),
        (title, ["expected, and answered:", *map(one_line, names), "(other)"], confusion),
    ]
