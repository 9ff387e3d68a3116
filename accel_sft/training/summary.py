"""What a run says of itself when it hands out weights: the model card, and the summary in result.json."""

from __future__ import annotations

import dataclasses
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.launch import describe
from accel_sft.models.load import compile_seconds
from accel_sft.tracking.model_card import model_card
from accel_sft.training.prepare import Prepared
from accel_sft.training.state import TrainState


def card(
    config: TrainConfig,
    task_name: str,
    task: Task,
    prepared: Prepared,
    before: dict[str, float] | None,
    after: dict[str, float] | None,
) -> str:
    """The README.md beside weights that scored `after`, where the untrained ones scored `before`."""
    return model_card(
        base_model=config.init_from or config.model,
        task=task_name,
        adapter=config.adapter,
        messages=task.messages(prepared.validation_examples[prepared.validation.kept[0].index]),
        max_new_tokens=config.max_new_tokens or prepared.longest_answer,
        data=prepared.counts(),
        settings=describe.recordable({**config.as_dict(), **dataclasses.asdict(task)}),
        result={"before": before or {}, "after": after or {}},
        versions=describe.versions(),
    )


def summary(config: TrainConfig, task_name: str, task: Task, state: TrainState, total_steps: int) -> dict[str, Any]:
    """What is known of a finished run without asking a device or another rank."""
    return {
        "status": "complete",
        "task": task_name,
        "model": config.init_from or config.model,
        "steps": state.step,
        "stopped_early": state.step < total_steps,
        "train_seconds": state.seconds,
        "tokens_per_second": state.tokens / state.seconds if state.seconds else None,
        **({"compile_seconds": compile_seconds()} if config.compile else {}),
        "best": {"step": state.best_step, task.main_metric: state.best},
        "before": state.before,
        "after": state.latest,
    }
