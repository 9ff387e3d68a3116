"""Collects the answers of all runs' evaluations for the report's page, each text once, up to a number of bytes."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_sft.io.files import mapping, read_text
from accel_sft.io.run_dir import step_of
from accel_sft.tools.report.runs import Run
from accel_sft.tracking.run_report import is_number

LONGEST_TEXT = 2000
"""Maximum number of characters of a prompt or an answer that the page shows."""
_ROWS = (1000, 500, 200, 100, 50, 20, 10)
"""How many answers of each evaluation to keep: these numbers are tried in turn until the answers fit the page."""
_NAMED = 4
"""Maximum number of runs that a sentence about what was left out names."""


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
    """Return as many of the runs' answers as fit into `most_bytes` of JSON, and sentences about what was left out.

    The newest evaluation of every run comes first, then the oldest of every run (the model before training), then the
    others, the newest first. If the newest and oldest do not all fit, each keeps only its first answers, the same
    number for all, so that they stay comparable.

    Returns:
        a dictionary, and the sentences. Its keys: `texts`; `examples`, for each a pair of indices into `texts` (prompt,
        expected answer); `scores`, their names; `evaluations`, each a dictionary with `run`, `step`, `label`, `count`
        (answers in the file) and `rows`: [index of the example, index of the answer's text, values of the scores].
    """
    first, others = _by_priority(runs)
    files = {evaluation: _read(runs, evaluation) for evaluation in first}
    longest = max(map(len, files.values()), default=0)
    for rows in (longest, *(each for each in _ROWS if each < longest)):
        pool = _Pool(most_bytes, rows)
        if all(pool.add(evaluation, samples) for evaluation, samples in files.items()):
            break
    for evaluation in others:
        samples = _read(runs, evaluation)
        if not pool.add(evaluation, samples):
            break
    return pool.content(), _left_out(runs, [*first, *others], pool, longest)


class _Pool:
    """Collects texts and rows until a number of bytes is used up."""

    def __init__(self, most_bytes: int, rows: int) -> None:
        self.left, self.rows = most_bytes, rows
        self.texts: dict[str, int] = {}
        self.examples: dict[tuple[int, int, int], int] = {}
        self.scores: dict[str, int] = {}
        self.evaluations: dict[RecordedEvaluation, dict[str, Any]] = {}
        self.cut = 0

    def add(self, evaluation: RecordedEvaluation, samples: Sequence[dict[str, Any]]) -> bool:
        """Add an evaluation and return True; return False, and show nothing of it, if it does not fit."""
        if not samples:
            self.evaluations[evaluation] = {}  # it has nothing that could be left out
            return True
        before = dict(self.texts), dict(self.examples), dict(self.scores), self.cut
        rows: list[list[Any]] = []
        seen: Counter[tuple[int, int]] = Counter()
        for sample in samples[: self.rows]:
            asked = self._text(sample.get("prompt")), self._text(sample.get("expected"))
            seen[asked] += 1  # the same question twice is two examples
            example = self.examples.setdefault((*asked, seen[asked]), len(self.examples))
            numbers = {str(k): n for k, n in mapping(sample.get("scores")).items() if is_number(n)}
            for name in numbers:
                self.scores.setdefault(name, len(self.scores))
            row = [example, self._text(sample.get("generated")), [numbers.get(name) for name in self.scores]]
            self.left -= len(json.dumps(row)) + 16  # about what its pair in `examples` takes
            rows.append(row)
            if self.left < 0:
                self.texts, self.examples, self.scores, self.cut = before
                return False
        self.evaluations[evaluation] = {
            "run": evaluation.run,
            "step": evaluation.step,
            "label": evaluation.label,
            "count": len(samples),
            "rows": rows,
        }
        return True

    def _text(self, value: Any) -> int:
        text = "" if value is None else str(value)
        if len(text) > LONGEST_TEXT:
            text = f"{text[:LONGEST_TEXT]}... ({len(text) - LONGEST_TEXT:,} more characters)"
            self.cut += text not in self.texts
        if text not in self.texts:
            self.texts[text] = len(self.texts)
            # a comma follows, and the page writes < as \u003c
            self.left -= len(json.dumps(text, ensure_ascii=False).encode(errors="replace")) + 1 + 5 * text.count("<")
        return self.texts[text]

    def content(self) -> dict[str, Any]:
        shown = sorted(filter(self.evaluations.get, self.evaluations), key=lambda each: (each.run, each.order))
        return {
            "texts": [*self.texts],
            "examples": [pair[:2] for pair in self.examples],
            "scores": [*self.scores],
            "evaluations": [self.evaluations[each] for each in shown],
        }


def _by_priority(runs: Sequence[Run]) -> tuple[list[RecordedEvaluation], list[RecordedEvaluation]]:
    newest, oldest, others = [], [], []
    for place, run in enumerate(runs):
        found = [*_evaluations(place, run)]
        newest += found[-1:]
        oldest += found[:1] if len(found) > 1 else []
        others += found[1:-1]
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


def _read(runs: Sequence[Run], evaluation: RecordedEvaluation) -> list[dict[str, Any]]:
    found, unreadable = [], 0
    try:
        text = read_text(evaluation.path, "replace")
    except OSError as error:
        runs[evaluation.run].notes.append(f"{evaluation.path.name} cannot be read: {error.strerror}")
        return []
    for line in filter(None, text.split("\n")):  # splitlines() would split at U+2028, too
        try:
            sample = json.loads(line)
        except (ValueError, RecursionError):
            sample = None
        if isinstance(sample, dict):
            found.append(sample)
        else:
            unreadable += 1
    if unreadable:
        runs[evaluation.run].notes.append(f"{evaluation.path.name} has lines that cannot be read: {unreadable}")
    return found


def _left_out(runs: Sequence[Run], all_: Sequence[RecordedEvaluation], pool: _Pool, longest: int) -> list[str]:
    said = []
    if pool.rows < longest:
        said.append(f"This page shows only the first {pool.rows:,} answers of each evaluation, of up to {longest:,}.")
    missing: dict[str, list[RecordedEvaluation]] = {}
    for evaluation in all_:
        if evaluation not in pool.evaluations and evaluation.path.stat().st_size:
            missing.setdefault(runs[evaluation.run].name, []).append(evaluation)
    named = [f"{name}, {_steps(evaluations)}" for name, evaluations in missing.items()]
    if named:
        more = f"; and evaluations of {len(named) - _NAMED} more runs" if len(named) > _NAMED else ""
        said.append(f"The page has no room for the answers of these evaluations: {'; '.join(named[:_NAMED])}{more}.")
    if pool.cut:
        said.append(f"Texts of which the first {LONGEST_TEXT:,} characters are shown: {pool.cut:,}.")
    if said:
        said.append("Every answer is in the runs' samples/ folders.")
    return said


def _steps(evaluations: Sequence[RecordedEvaluation]) -> str:
    steps = sorted(evaluation.step or 0 for evaluation in evaluations)
    if len(steps) == 1:
        return evaluations[0].label
    return f"{len(steps)} evaluations, steps {steps[0]} to {steps[-1]}"
