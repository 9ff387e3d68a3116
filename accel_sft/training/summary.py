"""The model card of exported weights, and a finished run's summary: result.json, report.md and the console."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from accel_sft.api.config import TrainConfig
from accel_sft.api.task import Task
from accel_sft.io.run_dir import RunDir
from accel_sft.io.terminal import terminal
from accel_sft.launch import describe
from accel_sft.models.load import compile_seconds
from accel_sft.tracking import report
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
        data=prepared.counts(),
        settings=describe.recordable({**config.as_dict(), **dataclasses.asdict(task)}),
        result={"before": before or {}, "after": after or {}},
        versions=describe.versions(),
    )


def summary(config: TrainConfig, task_name: str, task: Task, state: TrainState, total_steps: int) -> dict[str, Any]:
    """The part of result.json that needs neither a device nor another rank."""
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


def publish(run_dir: RunDir, result: dict[str, Any], state: TrainState) -> list[str]:
    """Write report.md and result.json and print the report; returns the lines to log after it. On rank 0 only."""
    before, after = (run_dir.read_samples(step) for step in (0, state.evaluated_step))
    report.write_report(run_dir, result, before, after)
    run_dir.write_result(result)
    report.print_report(result, before, after, console=Console(file=terminal(), highlight=False))
    best = f"best/ (step {state.best_step}) and " if state.best_step else ""
    lines = [f"{run_dir}: weights in {best}final/ (step {state.step}), numbers in report.md"]
    if left_out := result["steps_left_out"]:
        lines.insert(0, f"{left_out} of {state.step} steps were not finite and left out: {run_dir.nonfinite}")
    return lines
