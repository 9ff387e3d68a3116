"""The start of a command on each rank: audits the launch, builds the Accelerator, prints launch and settings."""

from __future__ import annotations

import os

from accelerate import Accelerator

from accel_sft.api.config import EVAL, MODEL, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.launch_limits import TENSOR_PARALLEL, launch_problem
from accel_sft.api.options import settings
from accel_sft.api.task import Task
from accel_sft.io.terminal import quiet, wrapped
from accel_sft.io.text import printable
from accel_sft.launch.accelerator import create_accelerator
from accel_sft.launch.audit import audit, refuse
from accel_sft.launch.describe import describe
from accel_sft.launch.environment import device_count, share_cores
from accel_sft.launch.info import Launch
from accel_sft.launch.machines import compare_machines
from accel_sft.launch.parallelism import fitted
from accel_sft.launch.read import read_launch
from accel_sft.launch.recordable import recordable

_TOY = (
    "note: --model is tiny, a toy of a million random weights, which knows no language: good to see that all works, "
    "no more; to fine-tune a model, name it: --model Qwen/Qwen2.5-0.5B-Instruct (a hub id), or a folder"
)


def begin() -> Launch:
    """Read the launch of this process; it ends here, with status 0, if the machine has no accelerator for its rank.

    So a launch file made for two GPUs also runs on one: the other ranks go on as a smaller world. Call it before
    anything else reads the number of ranks, and carry the launch: its file may be edited meanwhile.
    """
    launch = read_launch()
    here = fitted(launch, device_count())
    if here is not launch:
        if int(os.environ["LOCAL_RANK"]) >= here.local_world_size:
            raise SystemExit(0)
        ranks = {name: here.environment[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        os.environ.update(ranks)
        share_cores()
    return here


def start(
    launch: Launch, config: TrainConfig, task: Task, *, train: bool = True, began_with: str | None = None
) -> tuple[Accelerator, Launch]:
    """Audit a launch, build its Accelerator, and print the resolved launch and settings once.

    Args:
        launch: from `begin`. It is returned with its precision; record that.
        train: if False, this is an evaluation: only its settings are shown, and sequence parallelism is off.
        began_with: the precision of the run that is resumed or evaluated, for a launch that names no precision.
    Raises:
        UserError: the audit finds errors (one line each), or the launch cannot be used.
    """
    # notes are about training: an evaluation is not slower without a launcher, and has the run's own precision
    findings = [each for each in audit(config, launch) if train or each.level != "note"]
    refuse(findings)
    with quiet(None, config.debug) as terminal:
        accelerator, launch = create_accelerator(config, launch, train=train, began_with=began_with)
        backend = TENSOR_PARALLEL if launch.tensor_ranks > 1 else accelerator.distributed_type.value
        if problem := launch_problem(config, backend, launch.stage, launch.offload("optimizer")):
            raise UserError(problem)
        if launch.machines > 1:
            findings += compare_machines()
            refuse(findings)
        if accelerator.is_main_process:
            rows = [row for row in describe(accelerator, launch, config.max_grad_norm) if train or row[0] != "clipping"]
            width = max(len(name) for name, _ in rows)
            for name, value in rows:
                print(wrapped(f"{name:<{width}}  {value}", width + 2), file=terminal)
            for finding in findings:
                print(wrapped(f"{finding.level}: {finding}"), file=terminal)
            print(wrapped("settings  " + _settings_line(config, train), 10), file=terminal)
            if line := _task_line(task):
                print(wrapped(printable("task      " + line), 10), file=terminal)
            if config.model == "tiny" and not config.init_from and _rows_of(task):
                print(wrapped(_TOY), file=terminal)
            if config.dry_run:
                print("the launch is valid; data and model were not checked", file=terminal)
    return accelerator, launch


def _settings_line(config: TrainConfig, train: bool) -> str:
    """The settings that differ from the trainer's defaults, and model and seed in any case."""
    usual, values = TrainConfig(), config.as_dict()
    if not train:
        used = {setting.name for setting in settings(TrainConfig) if setting.section in (MODEL, EVAL)}
        used |= {"max_length", "thinking", "output_dir"}
        values = {k: v for k, v in values.items() if k in used}
    differing = {k: v for k, v in values.items() if v != getattr(usual, k) or k in ("model", "seed")}
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in differing.items())


def _rows_of(task: Task) -> list[str]:
    """The files, folders or data sets with rows that the user named in the task's options."""
    return [name for setting in settings(type(task)) if setting.rows and (name := getattr(task, setting.name))]


def _task_line(task: Task) -> str:
    """The task's settings that differ from its defaults; when a run is evaluated, the run's settings count."""
    mine = [setting for setting in settings(type(task)) if getattr(task, setting.name) != setting.default]
    values = recordable({setting.name: getattr(task, setting.name) for setting in mine})
    shown = {name: f"{value:g}" if isinstance(value, float) else value for name, value in values.items()}
    return ", ".join(f"{setting.flag[2:]} {shown[setting.name]}" for setting in mine)
