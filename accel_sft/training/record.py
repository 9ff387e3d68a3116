"""Writes run.json, the record of a run's settings, data and launch, which a resume must match; and run.yaml and
launch.yaml, which repeat the run."""

import hashlib
import json
import os
import shlex
from typing import Any

import torch
import yaml

import accel_sft
from accel_sft.api.config import TrainConfig, changed
from accel_sft.api.config_file import TASK
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings, shown
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record
from accel_sft.io import cache
from accel_sft.io.files import mapping, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.io.run_record import made_by
from accel_sft.io.text import one_line
from accel_sft.launch.collectives import decided_by_main
from accel_sft.launch.describe import launch_record, shown_folder
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION, launcher_command, own_words, torchrun_command
from accel_sft.launch.recordable import command_line, masked_words, recordable, without_secrets
from accel_sft.models.source import hub_place, weights_identity
from accel_sft.rows.fingerprint import code_fingerprint, task_record
from accel_sft.rows.rows import Rows
from accel_sft.training.prepare import Prepared


def write_run_record(run_dir: RunDir, task_name: str, prepared: Prepared, *, resumed: bool = False) -> dict[str, Any]:
    """Write `run.json` (settings, data and launch of the run) and `run.yaml`, which repeats the run. Returns the
    record's `made_by`: everything that the run's numbers depend on.

    A resumed run calls this twice. Before the checkpoint is loaded, the call only refuses differences from the record.
    Afterwards (`resumed`), when nothing can be refused any more, the call replaces the record.
    """
    assembly = prepared.assembly
    splits = {"train": prepared.train.examples, "validation": prepared.validation.examples}
    files = {name: rows for name, rows in splits.items() if isinstance(rows, Rows)}
    template = assembly.tokenizer.chat_template if assembly.config.chat_template is not None else None
    record = {
        "chat_template": template and hashlib.sha256(template.encode()).hexdigest(),
        "task": task_name,
        "model_commit": (hub_place(assembly.source.weights) or (None, None))[1],
        "config": assembly.config.as_dict(),
        "task_options": options_of(assembly.task),
        "total_steps": prepared.plan.total_steps,
        "max_new_tokens": prepared.longest_answer,
        "system_prompt": prepared.system_prompt,
        "raw_text": prepared.train.raw == prepared.train.kept.examples,
        "data": prepared.counts(),
        "data_sha256": prepared.fingerprint(),
        "data_files": {name: [[*file] for file in rows.sha256s] for name, rows in files.items()},
        "task_file": file_record(type(assembly.task)),
        **task_record(type(assembly.task)),
        "package_code": code_fingerprint(),
        "launch": launch_record(assembly.accelerator, prepared.launch),
        "relaunch": relaunch(prepared.launch),
    }

    def write() -> dict[str, Any]:
        if assembly.config.adapter != "none" or assembly.source.adapter:
            record["base_weights"] = weights_identity(assembly.source.weights)
        text = json.dumps(record, indent=2, ensure_ascii=False, default=str) + "\n"
        if not resumed and run_dir.record.exists() and run_dir.has_trained():
            _check_unchanged(run_dir.read_record(), record, run_dir)
        else:
            write_atomically(run_dir.record, text)
            write_run_yaml(run_dir, task_name, assembly.task, assembly.config, prepared.launch)
        return made_by(json.loads(text))

    return decided_by_main(assembly.accelerator, write)


def _check_unchanged(before: dict[str, Any], now: dict[str, Any], run_dir: RunDir) -> None:
    """Raise UserError if settings, task or data differ from the record; say what else may change the metrics."""
    different = changes(before, now["config"], now["task_options"])
    task, task_now = (_name_of_task(record) for record in (before, now))
    if task != task_now:
        different += [f"task: the run was started with {shown(task)}, not {task_now}"]
    if not different and before.get("chat_template") != now.get("chat_template"):
        name = shown(str(now["config"]["chat_template"]))
        different = [f"--chat-template {name}: the run was started with another template"]
    if not different and before.get("data_sha256") != now["data_sha256"]:
        files = _files_changed(before.get("data_files") or {}, now.get("data_files") or {})
        different = [f"the data is not what the run was started with{files and f' ({files})'}"]
    if different:
        how = "A run must resume with its original settings. To change them, let it finish, then start a new run with"
        raise UserError(*different, f"{how} --init-from {run_dir}.")
    base, base_now = before.get("base_weights"), now.get("base_weights")
    if base and base_now and base != base_now:  # an adapter's checkpoints do not hold the base weights
        raise UserError(
            "--model: the base weights under the adapter have changed since the run was started; restore them, or "
            "start a new run in another folder"
        )
    parts = "task_code", "task_libraries"
    file, file_now = (mapping(record.get("task_file")).get("sha256") for record in (before, now))  # it may have moved
    changed_file = file and file_now and file != file_now
    if changed_file or any(before.get(part) and now.get(part) and before[part] != now[part] for part in parts):
        change = "the task's code or libraries have changed since the last start"
        cache.log(f"{run_dir}: {change}. Metrics from before the change, also of best/, may not be comparable")


def _name_of_task(record: dict[str, Any]) -> str:
    """The task's name; for a task defined in a file, followed by its class name."""
    return f"{record['task']} {mapping(record.get('task_file')).get('class') or ''}".strip()


def _files_changed(before: dict[str, list[list[str]]], now: dict[str, list[list[str]]]) -> str:
    """The names of files that have changed, are new or are gone."""
    old, new = ({tuple(file): None for files in splits.values() for file in files} for splits in (before, now))
    changed = [name for name, sha256 in {**old, **new} if (name, sha256) not in old or (name, sha256) not in new]
    return ", ".join(dict.fromkeys(changed))


def options_of(task: Task) -> dict[str, Any]:
    """The task's options, without secrets."""
    return recordable({setting.name: getattr(task, setting.name) for setting in settings(type(task))})


def changes(before: dict[str, Any], config: dict[str, Any], task_options: dict[str, Any]) -> list[str]:
    """Return a line for each setting that differs from the record `before` although a resume must keep it."""
    given = {name for name, value in task_options.items() if value not in (None, "")}
    hidden = {name: HIDDEN for name in given if before["task_options"].get(name) == HIDDEN}
    return changed({**before["config"], **before["task_options"]}, {**config, **task_options, **hidden})


_LEFT_OUT = ("output_dir", "resume", "dry_run")
"""Settings that run.yaml leaves out: a repeated run has its own folder and begins at step 1."""
_IN_FILE = ("num_processes", "num_machines", "mixed_precision")
"""Flags of the launcher that go into launch.yaml, because the run's numbers depend on them; other flags stay flags."""


def write_run_yaml(run_dir: RunDir, task_name: str, task: Task, config: TrainConfig, launch: Launch) -> None:
    """Write run.yaml and launch.yaml into the run's folder, without secrets."""
    if launch.yaml:
        write_atomically(run_dir.launch, _launch_file(run_dir, launch))
    else:  # an earlier start of this run may have written launch.yaml
        run_dir.launch.unlink(missing_ok=True)
    file = file_record(type(task))
    named = {TASK: f"{file['path']}:{file['class']}" if file else task_name}
    values = {**config.as_dict(), **{setting.name: getattr(task, setting.name) for setting in settings(type(task))}}
    recorded = {name: value for name, value in recordable(values).items() if name not in _LEFT_OUT}
    recorded |= {name: HIDDEN for name, value in recorded.items() if value != values[name] and HIDDEN in str(value)}
    text = yaml.safe_dump({**named, **recorded}, sort_keys=False, allow_unicode=True, width=float("inf"))
    write_atomically(run_dir.settings, f"{_header(run_dir, launch)}\n{text}")


def _launch_file(run_dir: RunDir, launch: Launch) -> str:
    """The launch file's content, plus the command line's flags that affect the run's numbers, plus the precision used,
    since another machine might choose a different one. The file's DeepSpeed JSON, if any, is copied to the run."""
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
        f"# This run's launch as `accelerate launch` read it; the command is in run.yaml.\n{without_secrets(content)}"
    )


def relaunch(launch: Launch) -> dict[str, Any]:
    """How to start this launch again: the words of the launcher's command ([] without a launcher) and the variables to
    set. The caller adds the run's launch.yaml to the words, if it exists."""
    precision = launch.precision[0]
    if launcher := launcher_command()[0]:
        own = own_words(launcher, without=("config_file", *_IN_FILE) if launch.yaml else ())
        if not (launch.yaml or launch.json_file or "mixed_precision" in launch.arguments):
            own += ["--mixed_precision", precision]
        return {"words": masked_words(["accelerate", "launch", *own]), "environment": {}}
    words = ["torchrun", *own_words(torchrun)] if (torchrun := torchrun_command()) else []
    return {"words": masked_words(words), "environment": {PRECISION: precision} if precision != "no" else {}}


def _header(run_dir: RunDir, launch: Launch) -> str:
    """Return comments: the command that repeats the run, and what must be the same for bit-identical results."""
    folder, again = shown_folder(run_dir.path), relaunch(launch)
    words = [f"{name}={value}" for name, value in again["environment"].items()]
    if launcher := again["words"]:
        file = ["--config_file", os.path.join(folder, run_dir.launch.name)] if launch.yaml else []
        words += [*launcher[:2], *file, *launcher[2:], "-m", "accel_sft"]
    else:
        words += ["accel-sft"]
    words += ["--config", os.path.join(folder, run_dir.settings.name)]
    lines = [
        f"Written by accel_sft {accel_sft.__version__}. To repeat this run in a new folder, run",
        f"  {command_line(words)}",
        f"in the folder {os.getcwd()}.",
        "The weights are the same bit for bit (on GPUs with --deterministic) with the same data, versions,",
        f"kind of machine and threads per process ({torch.get_num_threads()}).",
        f"To go on with this run instead, add: --output-dir {shlex.quote(folder)} --resume auto",
    ]
    return "".join(f"# {one_line(line, len(line))}\n" for line in lines)
