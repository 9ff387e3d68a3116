"""`accel-sft plan`: says whether a task's training fits, under which launch file, and how fast."""

import json
import math
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import settings
from accel_sft.api.registry import suggestion
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import PlanConfig
from accel_sft.evaluation.scoring import UNANSWERED
from accel_sft.launch.info import FOLDER, Launch, shipped
from accel_sft.launch.parallelism import sized
from accel_sft.memory.job import AS_CONFIGURED, Job
from accel_sft.memory.lengths import Lengths, read
from accel_sft.memory.model_config import read_config, read_shape, stored_bytes
from accel_sft.memory.shape import ModelShape
from accel_sft.models.source import errors_explained, find_source, is_tiny, resolved
from accel_sft.models.tiny import TINY_SHAPE, TINY_VOCABULARY
from accel_sft.tools.plan.plans import (
    SIMPLEST_FIRST,
    Plan,
    PlannedMachine,
    launch_of,
    machine,
    plan,
    recommended,
)
from accel_sft.tools.plan.table import Answer

_CPU_TOKENS = 1024
"""Tokens of the smallest forward that the trainer chooses on a CPU, if --micro-batch-size is auto."""
_EVAL_ROWS = 64
"""Number of answers in one batch if --eval-batch-size is not given; for short answers a run may take more."""


def run(task_name: str, task: Task, config: PlanConfig) -> None:
    """Print the plan; exit with status 0 if a launch file fits, 1 if none does."""
    given, config = config, resolved(config, task)
    hardware = machine(config.gpus, config.gpu_memory, config.host_memory)
    lengths = read(task, config)
    content, name = model_config(config, lengths.vocabulary)
    shape, stored = read_shape(content, name), stored_bytes(content)
    plans = []
    for name, file in launch_files(config.launch):
        launch = launch_of(file, hardware)
        step_tokens = int(config.global_batch_size or 0) * lengths.mean * launch.tensor_ranks / launch.world_size
        job = job_of(config, task, shape, stored, launch, hardware, lengths, step_tokens)
        plans.append(plan(name, file, job, hardware, step_tokens, lengths.mean))
    best, why = recommended(plans)
    command = command_of(task_name, task, given, best, hardware) if best else None
    answer = Answer(plans, shape, hardware, lengths, config, best, why, command)
    print(json.dumps(answer.as_json(), indent=2) if config.json else "\n".join(answer.lines()))
    raise SystemExit(0 if best else 1)


def model_config(config: PlanConfig, vocabulary: int = 0) -> tuple[dict[str, Any], str]:
    """The content of the model's config.json, and the model's name for errors. `vocabulary` is the size of `tiny`'s
    vocabulary with this data; 0: the usual size."""
    if is_tiny(config.model, init_from=config.init_from):
        shape = {"model_type": "qwen2", "vocab_size": vocabulary or TINY_VOCABULARY, **TINY_SHAPE, "dtype": "float32"}
        return shape, "tiny"
    source = find_source(config.model, init_from=config.init_from)
    folder = Path(source.weights)
    if not folder.is_dir():
        from huggingface_hub import hf_hub_download

        with errors_explained(source.weights):
            folder = Path(hf_hub_download(source.weights, "config.json", revision=config.revision)).parent
    return read_config(folder), source.weights


def launch_files(wanted: str | None) -> list[tuple[str, Path]]:
    """Return name and path of each launch file that `--launch` names or, without it, of every shipped one."""
    by_name = shipped()
    if not wanted:
        ranked = [name for name in SIMPLEST_FIRST if name in by_name]
        return [(name, by_name[name]) for name in (*ranked, *sorted(by_name.keys() - {*ranked}))]
    files = []
    for name in wanted.split(","):
        if Path(name).is_file():
            files.append((Path(name).stem, Path(name)))
        elif (stem := name.removesuffix(".yaml")) in by_name:
            files.append((stem, by_name[stem]))
        else:
            near = suggestion(stem, by_name) or f"; shipped are {', '.join(sorted(by_name))}"
            raise UserError(f"--launch {name}: no such file, and no launch file of this name is shipped{near}")
    return files


def job_of(
    config: PlanConfig,
    task: Task,
    shape: ModelShape,
    stored_bytes: int,
    launch: Launch,
    hardware: PlannedMachine,
    lengths: Lengths,
    step_tokens: float,
) -> Job:
    """Return the job with the smallest forward that must fit: --micro-batch-size examples of the longest length. With
    `auto`, the forward has one example, and on a CPU at least as many tokens as the trainer would choose."""
    rows = 1 if config.micro_batch_size == "auto" else int(config.micro_batch_size)
    tokens, supervised = rows * lengths.longest, rows * lengths.longest_supervised
    if not hardware.gpus and config.micro_batch_size == "auto":
        tokens = max(tokens, min(_CPU_TOKENS, round(step_tokens)))
        supervised = max(supervised, round(tokens * lengths.mean_supervised / lengths.mean))
    held = max(rows, tokens // max(lengths.longest, 1))
    generates = config.eval_every != "off" and task.main_metric not in UNANSWERED
    answers = config.eval_batch_size or _EVAL_ROWS
    if config.eval_limit:
        answers = min(answers, math.ceil(config.eval_limit * launch.tensor_ranks / launch.world_size))
    return Job(
        shape=shape,
        launch=launch,
        device="cuda" if hardware.gpus else "cpu",
        stored_bytes=stored_bytes,
        target_modules=config.lora_target_modules,
        **{name: getattr(config, name) for name in AS_CONFIGURED},
        tokens=tokens,
        supervised_tokens=min(supervised, tokens),
        rows=held,
        pixels=(lengths.pixels or 0) * held,
        copied_keys=rows * lengths.longest if rows > 1 and config.batching in ("auto", "shared") else 0,
        eval_rows=answers if generates else 0,
        eval_tokens=lengths.longest,
        saves=config.save_every != "off",
    )


def command_of(task_name: str, task: Task, given: PlanConfig, best: Plan, hardware: PlannedMachine) -> str:
    """The command line that trains under this plan, with the options that the user gave to `plan`."""
    is_shipped = best.file.parent == FOLDER
    words = ["accelerate", "launch", "--config_file", f"{best.name}.yaml" if is_shipped else str(best.file)]
    if hardware.gpus:
        words += sized(best.job.launch, best.job.ranks)
    words += ["-m", "accel_sft", task_name, *words_of(replace(given, **best.more), task)]
    fetch = f"accel-sft launch-file {best.name} > {best.name}.yaml\n" if is_shipped else ""
    return fetch + shlex.join(words)


def words_of(config: TrainConfig, task: Task) -> list[str]:
    """The options of the trainer and of the task that differ from their defaults, as words of a command line."""
    words: list[str] = []
    for owner, offered in ((config, settings(TrainConfig)), (task, settings(type(task)))):
        for setting in offered:
            value = getattr(owner, setting.name)
            if value == setting.default or value is None:
                continue
            if isinstance(value, bool):
                words.append(setting.flag if value else f"--no-{setting.flag[2:]}")
            else:
                words += [setting.flag, str(value)]
    return words
