"""Claims a run's folder: locks it, so that one run uses it at a time, and checks a resumed run against its record."""

import dataclasses
import os
import secrets
import socket
import time
from pathlib import Path

from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.task import Task
from accel_sft.checkpoint.checkpoint import settle
from accel_sft.io.files import abandoned, expanded, made_folder
from accel_sft.io.lock import lock
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import Team, decided_by_main
from accel_sft.launch.info import Launch
from accel_sft.resilience.exit import folder_of_ranks, lost_peers
from accel_sft.training.record import changes, options_of

_SHARED_SECONDS = 10
"""Seconds that a network file system gets to show a new file to another machine."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A run's folder, locked for this run until the run ends."""

    run_dir: RunDir
    config: TrainConfig  # with the run's `template_date`; with `--resume auto` after a restart by the launcher
    finished: bool  # whether the run is complete and its settings are unchanged; a change is refused later
    fresh: bool  # whether nothing was in the folder


def claim_run_dir(accelerator: Accelerator, launch: Launch, task_name: str, task: Task, config: TrainConfig) -> Claim:
    """Create or reuse the run's folder, the same on every rank."""
    begun: list[RunDir] = []  # the folder, once it counts as this run's
    if launch.machines > 1 and not config.output_dir:
        raise UserError("--output-dir is missing: the launch has several machines, so name a folder that they share")

    def claim() -> Claim:
        note = _note_of_launch()
        earlier = _noted(note)
        name = config.output_dir or earlier or f"runs/{task_name}-{time.strftime('%Y%m%d-%H%M%S')}"
        path = expanded(name, "--output-dir").absolute()
        resume = "auto" if config.resume == "off" and str(path) == earlier else config.resume
        if resume not in ("off", "auto") and Path(resume).resolve().parent.parent != path.resolve():
            raise UserError(
                f"--resume {resume}: not a checkpoint of the run in --output-dir {name}; "
                "to start a new run from another run's weights, use --init-from"
            )
        try:
            path = made_folder(path, mine=not (config.output_dir or earlier))
            run_dir = RunDir(path)
            lock(path)
            # left by a run that was killed while it wrote its first file
            begun_file = {file for file in abandoned(path) if file.name.startswith(".result.json.")}
            status, occupied = run_dir.read_status(), bool({*path.iterdir()} - begun_file)
            if occupied:
                _refuse_occupied(run_dir, name, resume, status)
            if note:
                note.write_text(f"{os.getpid()} {path}", encoding="utf-8")
            settle(run_dir)
            if status != "complete":
                run_dir.write_result({"status": "running"})
                begun.append(run_dir)
            run_dir.logs.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--output-dir {name}: cannot be used ({error.strerror})") from None
        complete = resume != "off" and status == "complete"
        resumed = complete or (resume != "off" and run_dir.record.exists())
        before = run_dir.read_record() if resumed else {"config": {}}
        day = config.template_date or before["config"].get("template_date") or time.strftime("%Y-%m-%d")
        settled = dataclasses.replace(config, resume=resume, template_date=day)
        finished = complete and not changes(before, settled.as_dict(), options_of(task))
        return Claim(run_dir, settled, finished, not occupied)

    try:
        claimed = decided_by_main(accelerator, claim)
        if launch.machines > 1:
            _check_shared(accelerator, claimed.run_dir)
    except Exception as error:  # for example an error of a collective, if another rank was lost
        for run_dir in begun:
            run_dir.write_ended("failed", lost_peers() or str(error))
        raise
    return claimed


def _refuse_occupied(run_dir: RunDir, name: str, resume: str, status: str | None) -> None:
    failed_before_it_began = status == "failed" and not run_dir.metrics.exists()
    if resume == "off" and not failed_before_it_began:
        raise UserError(
            f"--output-dir {name}: not empty; name another folder, or continue the run in it with --resume auto"
        )
    if not run_dir.is_run():
        raise UserError(f"--output-dir {name}: not empty, and not a run of accel_sft; name another folder")


def _note_of_launch() -> Path | None:
    """A file in torchrun's temporary folder that tells later attempts of this launch the run's folder."""
    attempt = folder_of_ranks()
    return attempt.parent / "accel_sft-run-dir" if attempt else None


def _noted(file: Path | None) -> str:
    """The run's folder in an earlier attempt of this launch; "" if there was no earlier attempt."""
    writer, _, path = (file.read_text(encoding="utf-8") if file and file.is_file() else "").partition(" ")
    return "" if writer == str(os.getpid()) else path  # this process wrote it, for another run


def _check_shared(accelerator: Accelerator, run_dir: RunDir) -> None:
    """Raise UserError if a machine does not see rank 0's files in the run's folder: checkpoints must be shared."""

    def written() -> Path:
        token = run_dir.path / f".{secrets.token_hex(8)}.{os.getpid()}.tmp"  # `settle` removes it after a kill
        token.touch()
        return token

    def seen() -> None:
        until = time.monotonic() + _SHARED_SECONDS
        while not token.exists():
            if time.monotonic() > until:
                host, fix = socket.gethostname(), "name a folder on a file system that all machines share"
                raise UserError(f"--output-dir {run_dir}: {host} does not see a file that rank 0 wrote there; {fix}")
            time.sleep(0.2)

    token = decided_by_main(accelerator, written)
    try:
        Team(accelerator).firsts(seen)
    finally:
        if accelerator.is_main_process:
            token.unlink(missing_ok=True)
