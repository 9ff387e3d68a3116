"""Claims a run's folder by its lock, and keeps the record of settings and data that a resumed run must match."""

import dataclasses
import hashlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from accel_sft.api.changes import changed
from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings, shown
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record
from accel_sft.chat.conversation import read_split
from accel_sft.checkpoint.checkpoint import settle
from accel_sft.io import cache
from accel_sft.io.files import abandoned, expanded, made_folder, mapping, write_atomically
from accel_sft.io.lock import lock
from accel_sft.io.run_dir import RunDir
from accel_sft.io.run_record import made_by, other_versions
from accel_sft.launch.collectives import Team, decided_by_main
from accel_sft.launch.describe import launch_record
from accel_sft.launch.info import Launch
from accel_sft.launch.recordable import recordable
from accel_sft.models.source import hub_place, weights_identity
from accel_sft.resilience.exit import folder_of_ranks, lost_peers
from accel_sft.rows.fingerprint import code_fingerprint, task_record
from accel_sft.rows.rows import Rows
from accel_sft.training.prepare import Prepared
from accel_sft.training.run_yaml import relaunch, write_run_yaml

_SHARED_SECONDS = 10
"""Seconds that a network file system gets to show a new file to another machine."""


def claim_run_dir(
    accelerator: Accelerator, launch: Launch, task_name: str, task: Task, config: TrainConfig
) -> tuple[RunDir, TrainConfig, bool, bool]:
    """Create or reuse the run's folder, the same on every rank.

    Returns:
        the folder; `config`, with the day that templates are told, and with `--resume auto` if an earlier attempt of
        this launch claimed the folder; whether the folder's run is complete already, with these settings (others are
        refused later, by name); and whether nothing was in the folder.
    Raises:
        UserError: the folder is not empty and `--resume` is off, belongs to something else, or cannot be written.
    """
    claimed: list[RunDir] = []
    machines = launch.machines
    if machines > 1 and not config.output_dir:
        raise UserError("--output-dir: name a folder that all machines share; this launch has several")

    def claim() -> tuple[RunDir, str, str, bool, bool]:
        # in torchrun's temporary folder a file tells later attempts of this launch the run's folder
        attempt = folder_of_ranks()
        shared = attempt.parent / "accel_sft-run-dir" if attempt else None
        noted = shared.read_text(encoding="utf-8") if shared and shared.is_file() else ""
        writer, _, earlier = noted.partition(" ")
        if writer == str(os.getpid()):
            earlier = ""  # of another run of this attempt
        name = config.output_dir or earlier or f"runs/{task_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = expanded(name, "--output-dir").absolute()
        resume = config.resume
        if resume == "off" and str(path) == earlier:
            resume = "auto"
        if resume not in ("off", "auto") and Path(resume).resolve().parent.parent != path.resolve():
            raise UserError(
                f"--resume {resume}: not a checkpoint of the run in --output-dir {name}; "
                "to start a new run from another one's weights, use --init-from"
            )
        try:
            path = made_folder(path, mine=not (config.output_dir or earlier))
            run_dir = RunDir(path)
            lock(path)
            # A run that was killed while it wrote its first file left no more than these.
            begun = {file for file in abandoned(path) if file.name.startswith(".result.json.")}
            occupied, status = bool({*path.iterdir()} - begun), run_dir.read_status()
            failed_before_it_began = status == "failed" and not run_dir.metrics.exists()
            if occupied and resume == "off" and not failed_before_it_began:
                raise UserError(
                    f"--output-dir {name}: not empty; name another folder, or continue the run in it with --resume auto"
                )
            if occupied and not run_dir.is_run():
                raise UserError(f"--output-dir {name}: not empty, and not a run of accel_sft; name another folder")
            if shared:
                shared.write_text(f"{os.getpid()} {path}", encoding="utf-8")
            settle(run_dir)
            if status != "complete":  # from here on the folder counts as a run's
                run_dir.write_result({"status": "running"})
                claimed.append(run_dir)
            run_dir.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output-dir {name}: cannot be used ({error.strerror})") from None
        complete = resume != "off" and status == "complete"
        resumed = resume != "off" and (status == "complete" or run_dir.record.exists())
        before = run_dir.read_record() if resumed else {"config": {}}
        # templates are told the day on which the run was started, whenever and on whichever rank they are rendered
        day = config.template_date or before["config"].get("template_date") or time.strftime("%Y-%m-%d")
        settled = {**config.as_dict(), "template_date": day}
        return run_dir, resume, day, complete and not _changes(before, settled, _options(task)), not occupied

    try:
        run_dir, resume, day, finished, fresh = decided_by_main(accelerator, claim)
        if machines > 1:
            _check_shared(accelerator, run_dir)
    except Exception as error:  # such as a collective's, if another rank was lost
        for run_dir in claimed:
            run_dir.write_ended("failed", lost_peers() or str(error))
        raise
    return run_dir, dataclasses.replace(config, resume=resume, template_date=day), finished, fresh


def _check_shared(accelerator: Accelerator, run_dir: RunDir) -> None:
    """Raise UserError if a machine does not see what rank 0 writes into the run's folder: checkpoints need that."""

    def written() -> Path:
        token = run_dir.path / f".{secrets.token_hex(8)}.{os.getpid()}.tmp"  # `settle` removes it after a kill
        token.touch()
        return token

    def seen() -> None:
        until = time.monotonic() + _SHARED_SECONDS
        while not token.exists():
            if time.monotonic() > until:
                host, fix = socket.gethostname(), "name a folder on a file system that all machines share"
                raise UserError(f"--output-dir {run_dir}: {host} does not see what rank 0 wrote there; {fix}")
            time.sleep(0.2)

    token = decided_by_main(accelerator, written)
    try:
        Team(accelerator).firsts(seen)
    finally:
        if accelerator.is_main_process:
            token.unlink(missing_ok=True)


def write_run_record(run_dir: RunDir, task_name: str, prepared: Prepared, *, resumed: bool = False) -> dict[str, Any]:
    """Write `run.json` (settings, data and launch of the run) and `run.yaml`, by which the run can be started again.
    Returns what the record says that the run's numbers are decided by (`made_by`).

    If the folder's run has trained, a call without `resumed` only checks that the settings match its record. A later
    call with `resumed` replaces the record, because the resume may be refused in between.

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
        "task_options": _options(assembly.task),
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
    different = _changes(before, now["config"], now["task_options"])
    if before["task"] != now["task"]:
        different.append(f"task: the run was started with {shown(str(before['task']))}, not {now['task']}")
    file, file_now = before.get("task_file") or {}, now.get("task_file") or {}
    cls, cls_now = file.get("class"), file_now.get("class")
    if before["task"] == now["task"] and cls != cls_now:
        different.append(f"task: the run was started with {shown(str(cls))} of {now['task']}, not {cls_now}")
    if not different and before.get("chat_template") != now.get("chat_template"):
        name = now["config"]["chat_template"]
        different.append(f"--chat-template {shown(str(name))}: the template is another than the run was started with")
    if not different and before.get("data_sha256") != now["data_sha256"]:
        files = _files_changed(before.get("data_files") or {}, now.get("data_files") or {})
        different.append(f"the data is not what the run was started with{files and f' ({files})'}")
        if "control_tokens" not in before["config"] and now["config"]["control_tokens"] == "text":
            different.append("its version read control tokens in texts as tokens: --control-tokens tokens does so too")
    code, code_now = before.get("task_code"), now["task_code"]
    other = ["its code"] if file.get("sha256") != file_now.get("sha256") else []
    if not other and code and code_now and "task_libraries" in before:  # earlier hashes were of all that was installed
        other = ["its code"] if code != code_now else []
        other += other_versions(mapping(before["task_libraries"]), mapping(now.get("task_libraries")))
    if not different and other:
        cache.log(
            f"{run_dir}: the task has changed since the last start ({'; '.join(other)}): earlier metrics, the best one "
            "too, may be another score's"
        )
    was = before["task_options"]
    hidden = [f"--{k.replace('_', '-')}" for k, value in now["task_options"].items() if was.get(k) == HIDDEN != value]
    if not different and hidden:
        cache.log(f"note: {run_dir}: its record hides {', '.join(hidden)} as a secret, so a change cannot be seen")
    base, base_now = before.get("base_weights"), now.get("base_weights")
    if not different and base and base_now and base != base_now:  # checkpoints hold the adapter alone
        raise UserError(
            "--model: the weights below the adapter are not those that the run was started with; put those back, or "
            "start a new run in another folder"
        )
    if different:
        if run_dir.final.is_dir():
            start = f", or start a new run from its weights: --init-from {run_dir}"
        else:
            start = f"; to go on longer, let it end, and start a new run from its weights with --init-from {run_dir}"
            start += f" (from the best so far: --init-from {run_dir.best})" if run_dir.best.is_dir() else ""
        raise UserError(
            *different,
            f"{run_dir}: a resumed run computes what it would have without the stop, schedule included; "
            f"give the settings it was started with{start}",
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
    return {split: [[*each] for each in rows.sha256s] for split, rows in splits.items() if isinstance(rows, Rows)}


def _files_changed(before: dict[str, list[list[str]]], now: dict[str, list[list[str]]]) -> str:
    """The names of files that have changed, are new or are gone."""
    if not before:  # an earlier version kept no names
        return ""
    old, new = ({tuple(each): None for files in both.values() for each in files} for both in (before, now))
    changed = [name for name, sha256 in {**old, **new} if (name, sha256) not in old or (name, sha256) not in new]
    return ", ".join(dict.fromkeys(changed))


def _options(task: Task) -> dict[str, Any]:
    return recordable({setting.name: getattr(task, setting.name) for setting in settings(type(task))})


def _changes(before: dict[str, Any], config: dict[str, Any], task_options: dict[str, Any]) -> list[str]:
    options = recordable(before["task_options"])  # an earlier version masked other options
    given = {name for name, value in task_options.items() if value not in (None, "")}
    hidden = {name: HIDDEN for name in given if options.get(name) == HIDDEN}
    return changed({**before["config"], **options}, {**config, **task_options, **hidden})
