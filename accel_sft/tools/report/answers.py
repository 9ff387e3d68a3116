"""Collects the answers of the runs' evaluations for the report's page."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from accel_sft.io.files import is_number, mapping
from accel_sft.io.run_dir import step_of
from accel_sft.tools.report.runs import Run, read_lines

LONGEST_TEXT = 2000
"""Maximum number of characters of a prompt or an answer that the page shows."""
MOST_ROWS, _FEWEST_ROWS, _ROWS_OF_PAGE = 200, 20, 2000
"""Number of answers on the page: maximum for an evaluation, minimum for an evaluation (even if there are many
evaluations), and the aim for all evaluations together."""


def collect(runs: Sequence[Run]) -> dict[str, Any]:
    """The answers of each run's first, best and newest evaluation. All evaluations get the same number of first
    answers, so that they can be compared.

    Returns:
        `examples`: pairs (prompt, expected answer); `scores`: names of the scores; `evaluations`: dictionaries with
        `run`, `step` (None if the command `evaluate` made it), `label`, `count` (answers in the file) and `rows`:
        [index of the example, answer, scores by name].
    """
    evaluations = [(place, *one) for place, run in enumerate(runs) for one in _evaluations(run)]
    most = max(_FEWEST_ROWS, min(MOST_ROWS, _ROWS_OF_PAGE // max(len(evaluations), 1)))
    examples: dict[tuple[str, str, int], int] = {}
    scores: dict[str, None] = {}
    collected = []
    for place, step, label, path in evaluations:
        samples = read_lines(runs[place], path)
        rows: list[list[Any]] = []
        times: Counter[tuple[str, str]] = Counter()
        for sample in samples[:most]:
            prompt, expected, answer = (_shortened(sample.get(key)) for key in ("prompt", "expected", "generated"))
            times[prompt, expected] += 1  # a question that occurs twice is two examples
            example = examples.setdefault((prompt, expected, times[prompt, expected]), len(examples))
            numbers = {name: value for name, value in mapping(sample.get("scores")).items() if is_number(value)}
            scores |= dict.fromkeys(numbers)
            rows.append([example, answer, numbers])
        if rows:
            collected.append({"run": place, "step": step, "label": label, "count": len(samples), "rows": rows})
    return {"examples": [example[:2] for example in examples], "scores": [*scores], "evaluations": collected}


def _shortened(value: Any) -> str:
    text = "" if value is None else str(value)
    more = f"... ({len(text) - LONGEST_TEXT:,} more characters)" if len(text) > LONGEST_TEXT else ""
    return text[:LONGEST_TEXT] + more


def _evaluations(run: Run) -> Iterator[tuple[int | None, str, Path]]:
    """Step, name and file of the run's first, best and newest evaluation, or of `evaluate`'s base and tuned model."""
    paths = {step_of(path): path for path in run.folder.all_answers()}
    names = dict.fromkeys([*paths][:1], "first")
    names |= {step: "best" for step in paths if step == run.section("best").get("step")}
    names |= dict.fromkeys([*paths][-1:], "newest")
    names |= {step: "before training" for step in names if step == 0}
    for step in sorted(names):
        yield step, f"step {step} ({names[step]})", paths[step]
    weights = run.section("weights")
    for side in ("base", "tuned"):
        if (path := run.folder.answers_of(side)).exists():
            yield None, str(weights.get(side) or weights.get("model") or side), path
