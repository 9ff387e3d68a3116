"""Collects the answers of all runs' evaluations for the report's page, each text once, up to a number of bytes."""

import dataclasses
import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_sft.io.files import is_number, mapping, read_json_lines
from accel_sft.io.run_dir import step_of
from accel_sft.tools.report.runs import Run

LONGEST_TEXT = 2000
"""Maximum number of characters of a prompt or an answer that the page shows."""
MOST_ROWS, _FEWEST_ROWS = 200, 20
"""How many answers of each evaluation the page has; fewer, down to the second number, if very many runs are shown."""
_ROW_BYTES = 60
"""About what the numbers of an answer's row take, besides its texts."""

Samples = Sequence[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class RecordedEvaluation:
    """A file with the answers of one evaluation.

    Attributes:
        run: the index of its run.
        order: its index among the evaluations of the run.
        step: the step of training; None for an evaluation by the command `evaluate`.
        label: its name on the page.
    """

    run: int
    order: int
    step: int | None
    label: str
    path: Path


def collect(runs: Sequence[Run], most_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Return as many of the runs' answers as fit into `most_bytes` of JSON, and a sentence about what was left out.

    The newest evaluation of every run comes first, then the oldest of every run (the model before training), then the
    others, the newest first. Each has its first answers, the same number for all, so that they stay comparable.

    Returns:
        a dictionary, and the sentences. Its keys: `texts`; `examples`, for each a pair of indices into `texts` (prompt,
        expected answer); `scores`, their names; `evaluations`, each a dictionary with `run`, `step`, `label`, `count`
        (answers in the file) and `rows`: [index of the example, index of the answer's text, values of the scores].
    """
    first, others = _by_priority(runs)
    files = {evaluation: _read(runs, evaluation) for evaluation in first}
    longest, most = max(map(len, files.values()), default=0), MOST_ROWS
    while most > _FEWEST_ROWS and _size([row for rows in files.values() for row in rows[:most]], ()) > most_bytes:
        most //= 2
    texts: dict[str, int] = {}
    examples: dict[tuple[int, int, int], int] = {}
    scores: dict[str, int] = {}
    shown: dict[RecordedEvaluation, dict[str, Any]] = {}
    left_out: list[RecordedEvaluation] = []
    for evaluation in [*first, *others]:
        if left_out and evaluation in others:  # it is not even read
            left_out.append(evaluation)
            continue
        samples = files[evaluation] if evaluation in files else _read(runs, evaluation)
        size = _size(samples[:most], texts)
        if size > most_bytes:
            left_out.append(evaluation)
            continue
        most_bytes -= size
        if samples:
            about = {"run": evaluation.run, "step": evaluation.step, "label": evaluation.label, "count": len(samples)}
            shown[evaluation] = {**about, "rows": _rows(samples[:most], texts, examples, scores)}
    content = {
        "texts": [*texts],
        "examples": [example[:2] for example in examples],
        "scores": [*scores],
        "evaluations": [shown[key] for key in sorted(shown, key=lambda evaluation: (evaluation.run, evaluation.order))],
    }
    return content, _left_out(runs, left_out, most, longest)


def _rows(
    samples: Samples, texts: dict[str, int], examples: dict[tuple[int, int, int], int], scores: dict[str, int]
) -> list[list[Any]]:
    """The rows of an evaluation; its new texts, examples and names of scores are added to the dictionaries."""
    rows: list[list[Any]] = []
    times: Counter[tuple[int, int]] = Counter()
    for sample in samples:
        prompt, expected, answer = (texts.setdefault(text, len(texts)) for text in _texts(sample))
        times[prompt, expected] += 1  # the same question twice is two examples
        example = examples.setdefault((prompt, expected, times[prompt, expected]), len(examples))
        numbers = {str(name): value for name, value in mapping(sample.get("scores")).items() if is_number(value)}
        for name in numbers:
            scores.setdefault(name, len(scores))
        rows.append([example, answer, [numbers.get(name) for name in scores]])
    return rows


def _texts(sample: dict[str, Any]) -> Iterator[str]:
    """The prompt, the expected answer and the answer of a sample, as the page has them."""
    for key in ("prompt", "expected", "generated"):
        text = "" if sample.get(key) is None else str(sample[key])
        more = f"... ({len(text) - LONGEST_TEXT:,} more characters)" if len(text) > LONGEST_TEXT else ""
        yield text[:LONGEST_TEXT] + more


def _size(samples: Samples, on_page: Collection[str]) -> int:
    """About how many bytes samples take on a page that has the texts `on_page`."""
    new = {text for sample in samples for text in _texts(sample)}.difference(on_page)
    encoded = (json.dumps(text, ensure_ascii=False).encode(errors="replace") for text in new)
    # a comma follows, and the page writes < as \u003c
    in_texts = sum(len(text) + 1 + 5 * text.count(b"<") for text in encoded)
    return in_texts + sum(_ROW_BYTES + 8 * len(mapping(sample.get("scores"))) for sample in samples)


def _by_priority(runs: Sequence[Run]) -> tuple[list[RecordedEvaluation], list[RecordedEvaluation]]:
    newest, oldest, others = [], [], []
    for place, run in enumerate(runs):
        evaluations = [*_evaluations(place, run)]
        newest += evaluations[-1:]
        oldest += evaluations[:1] if len(evaluations) > 1 else []
        others += evaluations[1:-1]
    others.sort(key=lambda evaluation: -(evaluation.step or 0))
    return newest + oldest, others


def _evaluations(place: int, run: Run) -> Iterator[RecordedEvaluation]:
    for order, side in enumerate(("base", "tuned")):  # written by `evaluate --output-dir`
        path = run.folder.answers_of(side)
        if path.exists():
            weights = run.section("weights")
            yield RecordedEvaluation(place, order, None, str(weights.get(side) or weights.get("model") or side), path)
    paths = run.folder.all_answers()
    for order, path in enumerate(paths):
        step = step_of(path)
        what = "before training" if step == 0 else "newest" if path == paths[-1] else ""
        yield RecordedEvaluation(place, order, step, f"step {step}" + (f" ({what})" if what else ""), path)


def _read(runs: Sequence[Run], evaluation: RecordedEvaluation) -> Samples:
    notes = runs[evaluation.run].notes
    try:
        samples, unreadable = read_json_lines(evaluation.path)
    except OSError as error:
        notes.append(f"{evaluation.path.name} cannot be read: {error.strerror}")
        return []
    if unreadable:
        notes.append(f"{evaluation.path.name} has lines that cannot be read: {unreadable}")
    return samples


def _left_out(runs: Sequence[Run], evaluations: Sequence[RecordedEvaluation], most: int, longest: int) -> list[str]:
    parts = [f"the first {most:,} of up to {longest:,} answers of each evaluation"] if most < longest else []
    if evaluations:
        named = [f"{runs[evaluation.run].name}, {evaluation.label}" for evaluation in evaluations[:3]]
        more = f" and {len(evaluations) - 3} more" if len(evaluations) > 3 else ""
        parts.append(f"no answers of {'; '.join(named)}{more}, for which there is no room")
    return [f"This page has {', and '.join(parts)}. The runs' samples/ folders have all."] if parts else []
