"""Writes the model card of exported weights, and a finished run's summary: result.json, report.md and the console."""

import dataclasses
import shlex
from pathlib import Path
from typing import Any

from rich.console import Console

from accel_sft.api.config import TrainConfig
from accel_sft.api.options import NAMES_A_FILE, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record
from accel_sft.chat.conversation import conversation
from accel_sft.chat.form import Form
from accel_sft.chat.pictures import parted
from accel_sft.io.run_dir import RunDir, result_text
from accel_sft.io.run_record import write_manifest
from accel_sft.io.terminal import columns, terminal
from accel_sft.launch.describe import shown_folder, started_by
from accel_sft.launch.recordable import command_line, recordable, versions
from accel_sft.models.kernels import compile_seconds
from accel_sft.results import resampled
from accel_sft.results import run_report as report
from accel_sft.results.labels import weakest_label
from accel_sft.results.model_card import model_card
from accel_sft.results.run_report import time_sentence
from accel_sft.tracking.disturbed import disturbed_segments, sentences
from accel_sft.tracking.metrics_file import mean_mfu, read_lines
from accel_sft.training.prepare import Prepared
from accel_sft.training.record import options_of
from accel_sft.training.state import TrainState

_ASKED: tuple[str, ...] = ("max_length", "max_new_tokens", "thinking", "template_date", "control_tokens")
_ASKED += ("load_in_4bit", "chat_template", "seed")
"""Settings that a model card keeps, because later commands read them from the card."""


def card(
    task_name: str,
    prepared: Prepared,
    state: TrainState,
    model_class: str,
    scored: str,
    left_out: dict[str, Any],
) -> str:
    """Return the model card (README.md) of this state's weights; it compares the newest evaluation with the first.
    `scored` names the evaluated weights."""
    config, task, rendering = prepared.assembly.config, prepared.assembly.task, prepared.assembly.encode.rendering
    base = config.init_from or config.model
    chat = conversation(task, prepared.validation.examples, "validation", prepared.validation.kept[0].index)
    form = rendering.form(chat.turns, "validation", chat.offered) if chat.turns else Form()
    return model_card(
        base_model=base,
        task=task_name,
        adapter=config.adapter,
        model_class=model_class,
        messages=[] if rendering.template.concatenates else parted(form.given(chat.turns), chat.images),
        template_arguments={**chat.offered, **rendering.template.arguments},
        prompt_end=form.prompt_end,
        answer_end=rendering.tail(form),
        eos_ids=sorted(prepared.assembly.encode.rules.eos_ids),
        max_new_tokens=config.max_new_tokens or prepared.longest_answer,
        left_out=left_out,
        data={**_files(task), **prepared.counts(), "SHA-256 of the tokens": prepared.fingerprint()},
        command=command_line(started_by()),
        settings=recordable({**config.as_dict(), **dataclasses.asdict(task)}),
        result={  # without time and memory, which concern only this machine
            "before": {key: number for key, number in (state.before or {}).items() if key not in report.COSTS},
            "after": {key: number for key, number in (state.latest or {}).items() if key not in report.COSTS},
            "weights": {"base": f"{Path(base).name} before the first step", "tuned": f"{scored}, of step {state.step}"},
        },
        versions=versions(),
        asked=_asked(task_name, prepared),
    )


def _asked(task_name: str, prepared: Prepared) -> dict[str, Any]:
    """The parts of run.json that say how to prompt the model, without options for files of this machine."""
    config, train = recordable(prepared.assembly.config.as_dict()), prepared.train
    options = options_of(prepared.assembly.task)
    own = [setting for setting in settings(type(prepared.assembly.task)) if not NAMES_A_FILE.search(setting.name)]
    return {
        "task": task_name,
        "config": {name: config[name] for name in _ASKED if config[name] not in (None, False)},
        "task_options": {one.name: options[one.name] for one in own if options[one.name] != one.default},
        "max_new_tokens": prepared.longest_answer,
        "system_prompt": prepared.system_prompt,
        "raw_text": train.raw == train.kept.examples,
        "launch": {"precision": prepared.launch.precision[0]},
    }


def _files(task: Task) -> dict[str, str]:
    """File names given in the task's options, by option, without folders."""
    named = {setting.flag[2:]: getattr(task, setting.name) for setting in settings(type(task))}
    files = {flag: value.split(",") for flag, value in named.items() if flag.endswith("-file") and value}
    return {flag: ", ".join(Path(name).name for name in names) for flag, names in files.items()}


def publish(
    run_dir: RunDir,
    task_name: str,
    prepared: Prepared,
    state: TrainState,
    measured: dict[str, Any],
    evidence: dict[str, Any],
) -> list[str]:
    """Write report.md, result.json (with the `measured` values) and the folder's manifest (with the `evidence`); print
    the report. Returns the lines to log afterwards. On rank 0 only."""
    config, task = prepared.assembly.config, prepared.assembly.task
    base = config.init_from or config.model
    lines = read_lines(run_dir.metrics)
    speed = state.tokens / state.seconds if state.seconds else None
    mfu, disturbed = mean_mfu(lines), sentences(disturbed_segments(line for line in lines if "loss" in line))
    reason = state.stop_reason(prepared.plan.total_steps, config.patience)
    result = {
        "status": "complete",
        "task": task_name,
        "model": base,
        "steps": state.step,
        "stopped_early": reason is not None,
        "stop_reason": reason,
        "train_seconds": state.seconds,
        "tokens_per_second": speed,
        **({"tokens_per_second_per_device": speed / prepared.launch.world_size} if speed is not None else {}),
        **({"mfu": mfu} if mfu else {}),
        **({"disturbed": disturbed} if disturbed else {}),
        **({"compile_seconds": compile_seconds()} if config.compile else {}),
        "best": {"step": state.best_step, task.main_metric: state.best},
        "weights": {"base": f"{base} before the first step", "tuned": f"final/, of step {state.step}"},
        "main_metric": task.main_metric,
        **({"sources": prepared.plan.seen(state.step)} if config.mix else {}),
        "before": state.before,
        "after": state.latest,
        **measured,
    }
    before, after = (run_dir.read_samples(step) for step in (0, state.evaluated_step))
    resampled.add_intervals(result, task, before, after, run_dir)
    report.write_report(run_dir, result, before, after)
    write_manifest(run_dir, result_text(result), evidence)
    run_dir.write_result(result)
    console = Console(file=terminal(), highlight=False, width=columns())
    report.print_report(result, before, after, console)
    skipped = result["steps_left_out"]
    scored = "scores and answers" if after else "scores" if state.latest else "settings"  # raw text has no answers
    return [
        *([f"{skipped} of {state.step} steps were skipped as not finite: {run_dir.nonfinite}"] if skipped else []),
        *([f"stopped early: {reason}"] if reason else []),
        *([f"on rank 0 {time_sentence(measured['time_spent'])}"] if "time_spent" in measured else []),
        *([f"disturbed: {'; '.join(disturbed)}"] if disturbed else []),
        *([weakest_label(result)] if result.get("labels") else []),
        f"{run_dir}: weights in {_folders(task, state, averaged=config.ema_decay is not None)}, {scored} in report.md",
        *_next(run_dir, task_name, task, config),
    ]


def _folders(task: Task, state: TrainState, averaged: bool) -> str:
    """The folders of weights, with their steps and scores."""
    scores = {"best": (state.best_step, state.best), "final": (state.step, (state.latest or {}).get(task.main_metric))}
    folders = [
        f"{name}/ (step {step}{f', {task.main_metric} {score:.4g}' if score is not None else ''})"
        for name, (step, score) in scores.items()
        if step
    ]
    return " and ".join(folders) + " (averages; final-plain/ has the last step's weights)" * averaged


def _next(run_dir: RunDir, task_name: str, task: Task, config: TrainConfig) -> list[str]:
    """Commands to copy, one a line."""
    folder, file = shlex.quote(shown_folder(run_dir.path)), file_record(type(task))
    named = f"{shown_folder(Path(file['path']))}:{file['class']}" if file else task_name
    evaluate = f"accel-sft evaluate {shlex.quote(named)} --model {folder}{' --same-data' * bool(_files(task))}"
    commands = [f"accel-sft report {folder}", f"accel-sft generate {folder} PROMPT", evaluate]
    commands += [f"tensorboard --logdir {folder}"] if "tensorboard" in config.tracker else []
    return [f"{'' if number else 'next:':<5} {command}" for number, command in enumerate(commands)]
