"""Writes run.json, the record of a run's settings, data and launch, which a resumed run must match."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from accel_sft.api.config import changed
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings, shown
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record
from accel_sft.chat.conversation import read_split
from accel_sft.io import cache
from accel_sft.io.files import mapping, write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.io.run_record import made_by, other_versions
from accel_sft.launch.collectives import decided_by_main
from accel_sft.launch.describe import launch_record
from accel_sft.launch.recordable import recordable
from accel_sft.models.source import hub_place, weights_identity
from accel_sft.rows.fingerprint import code_fingerprint, task_record
from accel_sft.rows.rows import Rows
from accel_sft.training.prepare import Prepared
from accel_sft.training.run_yaml import relaunch, write_run_yaml


def write_run_record(run_dir: RunDir, task_name: str, prepared: Prepared, *, resumed: bool = False) -> dict[str, Any]:
    """Write `run.json` (settings, data and launch of the run) and `run.yaml`, by which the run can be started again.
    Returns what the record says that the run's numbers are decided by (`made_by`).

    Called twice for a run that has trained: before the resume it only compares with the record; after it (`resumed`),
    when nothing can be refused any more, it replaces the record.

    Raises:
        UserError: a resumed run's settings or data differ from what the folder records, one line each.
    """
    assembly = prepared.assembly
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
        "data_files": _data_files({"train": prepared.train.examples, "validation": prepared.validation.examples}),
        "task_file": file_record(type(assembly.task)),
        **task_record(type(assembly.task)),
        "package_code": code_fingerprint(),
        "launch": launch_record(assembly.accelerator, prepared.launch),
        "relaunch": relaunch(prepared.launch),
    }

    def write() -> dict[str, Any]:
        if assembly.config.adapter != "none" or assembly.source.adapter:
            record["base_weights"] = weights_identity(assembly.source)
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
    different += [*_task_changes(before, now)]
    different = different or [*_data_changes(before, now)]
    if different:
        raise UserError(*different, _how_to_go_on(run_dir))
    base, base_now = before.get("base_weights"), now.get("base_weights")
    if base and base_now and base != base_now:  # checkpoints hold the adapter alone
        raise UserError(
            "--model: the weights below the adapter are not those that the run was started with; put those back, or "
            "start a new run in another folder"
        )
    if code := _code_changes(before, now):
        cache.log(
            f"{run_dir}: the task has changed since the last start ({'; '.join(code)}): earlier metrics, the best one "
            "too, may be another score's"
        )
    was = before["task_options"]
    hidden = [f"--{k.replace('_', '-')}" for k, value in now["task_options"].items() if was.get(k) == HIDDEN != value]
    if hidden:
        cache.log(f"note: {run_dir}: its record hides {', '.join(hidden)} as a secret, so a change cannot be seen")


def _task_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if before["task"] != now["task"]:
        yield f"task: the run was started with {shown(str(before['task']))}, not {now['task']}"
        return
    before_class, class_now = (mapping(record.get("task_file")).get("class") for record in (before, now))
    if before_class != class_now:
        yield f"task: the run was started with {shown(str(before_class))} of {now['task']}, not {class_now}"


def _data_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    if before.get("chat_template") != now.get("chat_template"):
        name = now["config"]["chat_template"]
        yield f"--chat-template {shown(str(name))}: the template is another than the run was started with"
    if before.get("data_sha256") != now["data_sha256"]:
        files = _files_changed(before.get("data_files") or {}, now.get("data_files") or {})
        sampled = not files and now["config"].get("train_limit")
        why = "; an earlier version took the first rows for --train-limit" if sampled else files and f" ({files})"
        yield f"the data is not what the run was started with{why}"


def _code_changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What has changed of the task's code and of the libraries that it imports."""
    file, file_now = mapping(before.get("task_file")), mapping(now.get("task_file"))
    if file.get("sha256") != file_now.get("sha256"):
        return ["its code"]
    code, code_now = before.get("task_code"), now["task_code"]
    if not (code and code_now):
        return []
    libraries = other_versions(mapping(before.get("task_libraries")), mapping(now.get("task_libraries")))
    return ["its code"] * (code != code_now) + libraries


def _how_to_go_on(run_dir: RunDir) -> str:
    if run_dir.final.is_dir():
        start = f", or start a new run from its weights: --init-from {run_dir}"
    else:
        start = f"; to go on longer, let it end, and start a new run from its weights with --init-from {run_dir}"
        start += f" (from the best so far: --init-from {run_dir.best})" if run_dir.best.is_dir() else ""
    return (
        f"{run_dir}: a resumed run computes what it would have without the stop, schedule included; "
        f"give the settings it was started with{start}"
    )


def changes_since_finished(run_dir: RunDir, task: Task) -> list[str]:
    """Return a line that says so if a finished run's data files have changed or cannot be read any more; else []."""
    before = run_dir.read_record().get("data_files") or {}
    try:
        now = _data_files({split: read_split(task, split) for split in before})
    except UserError as error:
        return [f"its data can no longer be read: {error.problems[0]}"]
    files = _files_changed(before, now)
    return [f"its data has changed since ({files}): to train on it, start a run in another folder"] if files else []


def _data_files(splits: dict[str, Sequence[Any]]) -> dict[str, list[list[str]]]:
    """Return names and SHA-256 of each split's files, without splits that are not what `read_rows` returned."""
    return {split: [[*file] for file in rows.sha256s] for split, rows in splits.items() if isinstance(rows, Rows)}


def _files_changed(before: dict[str, list[list[str]]], now: dict[str, list[list[str]]]) -> str:
    """The names of files that have changed, are new or are gone."""
    old, new = ({tuple(file): None for files in splits.values() for file in files} for splits in (before, now))
    changed = [name for name, sha256 in {**old, **new} if (name, sha256) not in old or (name, sha256) not in new]
    return ", ".join(dict.fromkeys(changed))


def options_of(task: Task) -> dict[str, Any]:
    """The task's options, without secrets."""
    return recordable({setting.name: getattr(task, setting.name) for setting in settings(type(task))})


def changes(before: dict[str, Any], config: dict[str, Any], task_options: dict[str, Any]) -> list[str]:
    """Return a line for each setting of the record `before` that a resume may not change, and changes."""
    given = {name for name, value in task_options.items() if value not in (None, "")}
    hidden = {name: HIDDEN for name in given if before["task_options"].get(name) == HIDDEN}
    return changed({**before["config"], **before["task_options"]}, {**config, **task_options, **hidden})
