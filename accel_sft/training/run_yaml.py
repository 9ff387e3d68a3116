"""Writes `run.yaml` and `launch.yaml` into a run's folder: settings and launch, for a command that starts it again."""

import json
import os
import shlex
import textwrap
from typing import Any

import torch
import yaml

import accel_sft
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import TASK
from accel_sft.api.options import HIDDEN, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record
from accel_sft.io.files import write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import one_line
from accel_sft.launch.describe import shown_folder
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION, launcher_command, own_words, torchrun_command
from accel_sft.launch.recordable import command_line, masked_words, recordable, without_secrets
from accel_sft.models.source import resolved

_LEFT_OUT = ("output_dir", "resume", "dry_run")
"""Settings that run.yaml leaves out: a run that is started again has its own folder, and begins at its first step."""
_IN_FILE = ("num_processes", "num_machines", "mixed_precision")
"""Flags of the launcher that go into launch.yaml, because the run's numbers depend on them; other flags stay flags."""


def write_run_yaml(run_dir: RunDir, task_name: str, task: Task, config: TrainConfig, launch: Launch) -> None:
    """Write both files into the run's folder, without secrets.

    Args:
        task_name: an installed task's name; for a task in a file, its path is written.
        config: the resolved settings.
        launch: the launch as `start` read it, with its precision.
    """
    if launch.yaml:
        write_atomically(run_dir.launch, _launch_file(run_dir, launch))
    else:  # an earlier start of this run may have written one
        run_dir.launch.unlink(missing_ok=True)
    file = file_record(type(task))
    named = {TASK: f"{file['path']}:{file['class']}" if file else task_name}
    usual = TrainConfig(model=config.model, init_from=config.init_from, adapter=config.adapter)
    defaults = resolved(usual, task).as_dict()
    # values that count as defaults: None for the model, so that it counts as chosen; the adapter, whose own default is
    # none, was given above because other settings' defaults depend on it
    defaults |= {"model": None, "init_from": None, "adapter": "none", "template_date": config.template_date}
    defaults |= {setting.name: setting.default for setting in settings(type(task))}
    values = {**config.as_dict(), **{setting.name: getattr(task, setting.name) for setting in settings(type(task))}}
    recorded = {name: value for name, value in recordable(values).items() if name not in _LEFT_OUT}
    recorded |= {name: HIDDEN for name, value in recorded.items() if value != values[name] and HIDDEN in str(value)}
    chosen = {name: value for name, value in recorded.items() if value != defaults[name]}
    rest = {name: value for name, value in recorded.items() if name not in chosen}
    note = "# By default; remove what is below to have the defaults of another model, or of a later version.\n"
    text = f"{_header(run_dir, launch)}\n{_yaml(named)}{_yaml(chosen)}\n{note}{_yaml(rest)}"
    write_atomically(run_dir.settings, text)


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, width=float("inf")) if values else ""


def _launch_file(run_dir: RunDir, launch: Launch) -> str:
    """The launch file's content, with the flags of the command line that decide the run's numbers, and with the
    precision used, which another machine might not choose. A DeepSpeed JSON that it names is copied to the run."""
    content = dict(launch.yaml)
    for name in _IN_FILE:
        if (value := launch.arguments.get(name)) is not None:
            content[name] = int(value) if value.isdecimal() else value
    section, precision = content.get("deepspeed_config") or {}, launch.precision[0]
    if launch.json_file and section.get("deepspeed_config_file"):
        content.pop("mixed_precision", None)  # the launcher takes the precision from one file only
        kinds = {name: {**(launch.json.get(name) or {}), "enabled": name == precision} for name in ("bf16", "fp16")}
        write_atomically(run_dir.deepspeed, json.dumps(recordable({**launch.json, **kinds}), indent=2) + "\n")
        content["deepspeed_config"] = {**section, "deepspeed_config_file": str(run_dir.deepspeed)}
    else:
        content["mixed_precision"] = precision
    return (
        f"# What `accelerate launch` read of this run's launch; the command is in run.yaml.\n{without_secrets(content)}"
    )


def relaunch(launch: Launch) -> dict[str, Any]:
    """How a run of this launch is started again: the launcher's own words ([] without one), among which the run's
    launch.yaml is to be named if there is one, and the variables to set."""
    precision = launch.precision[0]
    if launcher := launcher_command()[0]:
        own = own_words(launcher, without=("config_file", *_IN_FILE) if launch.yaml else ())
        if not (launch.yaml or launch.json_file or "mixed_precision" in launch.arguments):
            own += ["--mixed_precision", precision]
        return {"words": masked_words(["accelerate", "launch", *own]), "environment": {}}
    words = ["torchrun", *own_words(torchrun)] if (torchrun := torchrun_command()) else []
    return {"words": masked_words(words), "environment": {PRECISION: precision} if precision != "no" else {}}


def _header(run_dir: RunDir, launch: Launch) -> str:
    """Return comments: the command that starts the run again, and what else must be the same for equal bits."""
    folder, again = shown_folder(run_dir.path), relaunch(launch)
    words = [f"{name}={value}" for name, value in again["environment"].items()]
    if launcher := again["words"]:
        file = ["--config_file", os.path.join(folder, run_dir.launch.name)] if launch.yaml else []
        words += [*launcher[:2], *file, *launcher[2:], "-m", "accel_sft"]
    else:
        words += ["accel-sft"]
    words += ["--config", os.path.join(folder, run_dir.settings.name)]
    same = (
        f"The weights are the same bit for bit (on GPUs with --deterministic) with the same data, versions, kind of "
        f"machine and threads per process ({torch.get_num_threads()}). Options of the command line win over this "
        f"file. To go on with this run instead, add: --output-dir {shlex.quote(folder)} --resume auto"
    )
    lines = [
        f"Written by accel_sft {accel_sft.__version__}. The same run again, in a new folder:",
        f"  {command_line(words)}",
        f"as seen from {os.getcwd()}.",
        *textwrap.wrap(same, 116, break_long_words=False),
    ]
    return "".join(f"# {one_line(line, len(line))}\n" for line in lines)
