"""Lets the task score answers and aggregate the scores, and checks what the task returns."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.chat.conversation import conversation, from_task, wanted
from accel_sft.io.heartbeat import heartbeat, heartbeats_only
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.results.run_report import COSTS, NOT_OF_ANSWERS
from accel_sft.rows.rows import example_name

EVAL_LOSS = "eval_loss"
PERPLEXITY = "perplexity"
"""exp(eval_loss)."""
UNANSWERED = (EVAL_LOSS, PERPLEXITY)
"""If one of these is a task's main metric, no answers are generated or scored."""
_UNUSABLE = "the task's aggregate() failed, or gave something other than a dict of numbers"
_TRIED = 8
"""Number of validation examples whose targets are scored as a test, before the model is loaded."""


def check_scoring(
    task: Task, examples: Sequence[Any], thinking: str | None = None, split: str = "validation"
) -> list[str]:
    """Score the targets of a split's first examples, so that a mistake in the task is found before training.
    Return a warning (in a list) if the main metric is 0 for them. An aggregate() that fails on so few is accepted."""
    if task.main_metric in UNANSWERED:
        return []
    chats = {index: conversation(task, examples, split, index) for index in range(min(len(examples), _TRIED))}
    # without tool calls: the chat template decides how these are written
    targets = {index: wanted(chat, thinking) for index, chat in chats.items() if not chat.calls}
    if not targets:
        return []
    scores = []
    with heartbeats_only():  # as in training; otherwise an endless score() would count as progress
        for index, text in targets.items():
            scores.append(scored(task, examples, index, text, split))
            heartbeat()
        try:
            metrics = task.aggregate(scores)
        except UserError:
            raise
        except Exception:  # noqa: BLE001 - if it also fails with more scores, the first evaluation reports the error
            return []
    main = task.main_metric
    if _checked(task, metrics)[main] or not task.higher_is_better:
        return []
    answers = f"the expected answers of the first {len(targets)} {split} examples"
    return [f"warning: {main} is 0 for {answers}; check the task's options, or its score()"]


def limits_on_scores(task: Task, validation: Any, config: TrainConfig) -> list[str]:
    """A warning (in a list) if expected answers are longer than `--max-new-tokens`. `validation`: a StoredEncoding."""
    rows, most = validation.kept, config.max_new_tokens
    if task.main_metric in UNANSWERED or config.eval_every == "off" or not most:
        return []
    cut = int((rows.answers - 1 > most).sum())  # the token that ends an answer does not count
    limit = f"--max-new-tokens {most}, and cannot be generated in full"
    return [f"warning: {cut:,} of {len(rows):,} validation answers have more tokens than {limit}"] if cut else []


def scored(task: Task, examples: Sequence[Any], index: int, text: str, split: str = "validation") -> dict[str, Any]:
    """The task's score of `text` as the answer to an example: a dict that JSON can hold."""
    where = example_name(examples, split, index)
    example = from_task(f"{where}: the task's dataset failed", lambda: examples[index])
    scores = from_task(f"{where}: the task's score() failed on {text[:80]!r}", lambda: task.score(example, text))
    if not isinstance(scores, dict):
        raise UserError(f"{where}: score() gave {one_line(repr(scores))}, expected a dict of numbers")
    try:
        json.dumps(scores, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        why = f"which JSON cannot hold ({one_line(str(error), LONGEST_ERROR)}); give plain numbers and text"
        raise UserError(f"{where}: score() gave {one_line(repr(scores))}, {why}") from error
    return scores


def aggregated(task: Task, scores: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The task's metrics from all examples' scores: numbers by name, the main metric among them."""
    return _checked(task, from_task(_UNUSABLE, lambda: task.aggregate(scores)))


def _checked(task: Task, given: Mapping[str, Any]) -> dict[str, float]:
    metrics = from_task(_UNUSABLE, lambda: {str(key): float(value) for key, value in given.items()})
    main = task.main_metric
    if main not in metrics:
        method = "aggregate" if type(task).aggregate is not Task.aggregate else "score"  # whose keys name the metrics
        raise UserError(f"the task's {method}() gave {sorted(metrics)}, without its main_metric {main!r}; add it")
    if taken := metrics.keys() & {"step", "loss", *NOT_OF_ANSWERS, *COSTS}:
        names = ", ".join(sorted(taken))
        raise UserError(f"the task's aggregate() gave {names}, which are names of the trainer's metrics; rename them")
    return metrics
