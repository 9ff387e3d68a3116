"""Collects the answers of the runs' evaluations for the report's page, up to a number of bytes."""

import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from accel_sft.io.files import is_number, json_safe, mapping, read_json_lines
from accel_sft.io.run_dir import step_of
from accel_sft.tools.report.runs import Run

LONGEST_TEXT = 2000
"""Maximum number of characters of a prompt or an answer that the page shows."""
MOST_ROWS, _FEWEST_ROWS = 200, 20
"""How many answers of each evaluation the page has; fewer, down to the second number, where there is little room."""


class Evaluation(NamedTuple):
    """The answers of one evaluation: the index of its run, the step of training (None for one by the command
    `evaluate`), its name on the page, and the rows of its file."""

    run: int
    step: int | None
    label: str
    samples: Sequence[dict[str, Any]]


def collect(runs: Sequence[Run], most_bytes: int) -> tuple[dict[str, Any], list[str]]:
    """Return the answers of each run's newest, best and first evaluation, as many as fit into `most_bytes` of JSON, and
    a sentence on what was left out. All have as many of their first answers, so that they stay comparable.

    Returns:
        a dictionary, and the sentence. Its keys: `examples`, for each its prompt and expected answer; `scores`, their
        names; `evaluations`, each a dictionary with `run`, `step`, `label`, `count` (answers in the file) and `rows`:
        [index of the example, answer, values of the scores].
    """
    of_runs = [[one for one in _evaluations(place, run) if one.samples] for place, run in enumerate(runs)]
    evaluations = [one for of_turn in itertools.zip_longest(*of_runs) for one in of_turn if one]
    longest, total = max((len(one.samples) for one in evaluations), default=0), len(evaluations)
    most = MOST_ROWS
    while evaluations and _bytes(content := _content(evaluations, most)) > most_bytes:
        if most // 2 >= _FEWEST_ROWS:
            most //= 2
        else:
            evaluations = evaluations[: len(evaluations) * 3 // 4]
    parts = [f"the first {most:,} of up to {longest:,} answers of each evaluation"] if most < longest else []
    parts += [f"no answers of {total - len(evaluations)} evaluations"] if len(evaluations) < total else []
    left_out = [f"This page has {', and '.join(parts)}. The runs' samples/ folders have all."] if parts else []
    return content if evaluations else _content([], 0), left_out


def _content(evaluations: Sequence[Evaluation], most: int) -> dict[str, Any]:
    examples: dict[tuple[str, str, int], int] = {}
    scores: dict[str, int] = {}
    in_order, shown = list(reversed(evaluations)), []  # the first before newer ones
    in_order.sort(key=lambda evaluation: evaluation.run)
    for run, step, label, samples in in_order:
        rows: list[list[Any]] = []
        times: Counter[tuple[str, str]] = Counter()
        for sample in samples[:most]:
            prompt, expected, answer = (_shortened(sample.get(key)) for key in ("prompt", "expected", "generated"))
            times[prompt, expected] += 1  # the same question twice is two examples
            example = examples.setdefault((prompt, expected, times[prompt, expected]), len(examples))
            numbers = {str(name): value for name, value in mapping(sample.get("scores")).items() if is_number(value)}
            for name in numbers:
                scores.setdefault(name, len(scores))
            rows.append([example, answer, [numbers.get(name) for name in scores]])
        shown.append({"run": run, "step": step, "label": label, "count": len(samples), "rows": rows})
    return {"examples": [example[:2] for example in examples], "scores": [*scores], "evaluations": shown}


def _shortened(value: Any) -> str:
    text = "" if value is None else str(value)
    more = f"... ({len(text) - LONGEST_TEXT:,} more characters)" if len(text) > LONGEST_TEXT else ""
    return text[:LONGEST_TEXT] + more


def _bytes(value: Any) -> int:
    """How many bytes a value takes on the page, which writes < as \\u003c."""
    text = json.dumps(json_safe(value), ensure_ascii=False).encode(errors="replace")
    return len(text) + 5 * text.count(b"<")


def _evaluations(place: int, run: Run) -> Iterator[Evaluation]:
    """The newest first, then the best, then the first; the command `evaluate` leaves a tuned one and a base."""
    weights = run.section("weights")
    for side in ("tuned", "base"):
        label = str(weights.get(side) or weights.get("model") or side)
        if (path := run.folder.answers_of(side)).exists():
            yield Evaluation(place, None, label, _read(run, path))
    paths = {step_of(path): path for path in run.folder.all_answers()}
    newest, best = [*paths][-1:], [step for step in paths if step == run.section("best").get("step")]
    for step in dict.fromkeys([*newest, *best, *[*paths][:1]]):
        name = "before training" if step == 0 else "newest" if step in newest else "best" if step in best else "first"
        yield Evaluation(place, step, f"step {step} ({name})", _read(run, paths[step]))


def _read(run: Run, path: Path) -> list[dict[str, Any]]:
    try:
        samples, unreadable = read_json_lines(path)
    except OSError as error:
        run.notes.append(f"{path.name} cannot be read: {error.strerror}")
        return []
    if unreadable:
        run.notes.append(f"{path.name} has lines that cannot be read: {unreadable}")
    return samples
