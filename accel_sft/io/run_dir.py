"""Names every file of a run's folder, and reads and writes the small ones. Needs only the standard library."""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from accel_sft.api.config import keep_every
from accel_sft.api.errors import UserError
from accel_sft.io.files import (
    abandoned,
    expanded,
    json_safe,
    read_json,
    read_json_lines,
    read_object,
    read_text,
    write_atomically,
)

RUNS = "runs"
"""The folder of runs, unless `--output-dir` names a different one."""
_RECORD = {"task": str, "config": dict, "task_options": dict}
"""Keys and types of run.json in every version; a file without them is not taken for a run's record."""
_BEFORE_RECORD = {"result.json", "logs", "base", ".base.partial", ".base.outgoing"}
"""Names that a run may have left if it was killed before it wrote its record."""


def _inside(*names: str) -> property:
    return property(lambda self: self.path.joinpath(*names))


@dataclasses.dataclass(frozen=True)
class RunDir:
    """The folder `path` of one run; `evaluate --output-dir` makes a folder with only result, report and answers."""

    path: Path

    record = _inside("run.json")
    """Settings, data and launch that the run was started with; a resume is compared with this record."""
    settings = _inside("run.yaml")
    """Task and settings, as a file for `--config` that starts the same run again."""
    launch = _inside("launch.yaml")
    """The launch file's content, with the launcher's flags that decide the run's numbers."""
    deepspeed = _inside("deepspeed.json")
    """A copy of the DeepSpeed JSON that the launch file named."""
    result = _inside("result.json")
    """The run's status and, once complete, its summary."""
    resamples = _inside("resamples.json")
    """The main metric on resamples of the examples, for tests against other runs; absent if that metric is a mean."""
    report = _inside("report.md")
    metrics = _inside("metrics.jsonl")
    nonfinite = _inside("nonfinite.jsonl")
    """Steps that were not applied because the loss or the gradient was NaN or infinite."""
    batching = _inside("batching.json")
    """The batching that was chosen before step 1."""
    most_tokens = _inside("most-tokens.json")
    """The limit of tokens per forward, set after a step ran out of memory and could not be repeated."""
    base = _inside("base")
    """The built-in model as it was before training."""
    best = _inside("best")
    final = _inside("final")
    final_plain = _inside("final-plain")
    """With `--ema-decay`, the weights after the last step; final/ then has the averaged weights."""
    profile = _inside("profile")
    logs = _inside("logs")
    samples = _inside("samples")
    checkpoints = _inside("checkpoints")
    latest = _inside("checkpoints", "latest")
    """A file that names the newest checkpoint; it is written after that checkpoint."""

    def __str__(self) -> str:
        return str(self.path)

    @classmethod
    def record_around(cls, model: str) -> dict[str, Any] | None:
        """The run.json in the folder `model` or in the folder above it; if neither has one, the record in the model
        card in `model`. None without a record, and if `model` is a hub id."""
        folder = expanded(model).absolute()
        folders = (folder, folder.parent) if folder.is_dir() else ()
        run = next((run for run in map(cls, folders) if run.record.is_file()), None)
        return run.read_record() if run else _record_in(folder / "README.md")

    @classmethod
    def weights_in(cls, model: str) -> str:
        """The best/ of the run in the folder `model`, or the run's final/ if there is no best/; `model` itself if it is
        not a run. (Training from an earlier run takes that run's final/, see `find_source`.)"""
        run = cls(expanded(model))
        if not run.record.is_file():
            return model
        weights = next((folder for folder in (run.best, run.final) if folder.is_dir()), None)
        if weights is None:
            raise UserError(f"{model}: this run has neither best/ nor final/ yet; resume it first")
        return str(weights)

    @classmethod
    def choice_in(cls, model: str, *, train: bool = False) -> list[str]:
        """A note (in a list) that says which weights `weights_in` returns or, with `train`, with which weights a
        training from this run starts; [] if the run does not have both best/ and final/."""
        run = cls(expanded(model))
        if not (run.record.is_file() and run.best.is_dir() and run.final.is_dir()):
            return []
        taken, step, folder = ("final", "best", run.best) if train else ("best", "last", run.final)
        return [f"note: using this run's {taken}/ weights; for the weights of its {step} step, name {folder}"]

    def answers(self, step: int) -> Path:
        """The answers of the evaluation at `step`."""
        return self.samples / f"step-{step:06d}.jsonl"

    def answers_of(self, side: str) -> Path:
        """The answers of the model "base" or "tuned", as `evaluate` writes them."""
        return self.path / f"samples-{side}.jsonl"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step:06d}"

    def log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def stacks(self, rank: int | str) -> Path:
        """The stacks of a rank that hung; "*" makes a pattern for all ranks."""
        return self.logs / f"hang-rank-{rank}.txt"

    def all_checkpoints(self) -> list[Path]:
        """The checkpoints' folders, oldest first."""
        return _by_step(self.checkpoints, "")

    def all_answers(self) -> list[Path]:
        """The files of answers, in the order of their steps."""
        return _by_step(self.samples, ".jsonl")

    def has_trained(self) -> bool:
        """Whether there are checkpoints or final weights, which a run with other settings may not replace."""
        return bool(self.all_checkpoints()) or self.final.is_dir()

    def read_record(self) -> dict[str, Any]:
        """The content of run.json; raises UserError if it cannot be read, or is not a record of this package."""
        record = read_json(self.record)
        if not _is_record(record):
            raise UserError(f"{self.record}: not the record of a run of accel_sft; name another folder")
        return record

    def is_run(self) -> bool:
        """Whether the folder is a run's: it has a record, or only what an unfinished run writes before its record."""
        if self.record.exists():
            return bool(self.read_record())
        others = {path.name for path in {*self.path.iterdir()} - {*abandoned(self.path)}} - _BEFORE_RECORD
        return not others and self.read_status() in ("running", "interrupted", "failed")

    def write_result(self, result: Mapping[str, Any]) -> Path:
        """Write the run's summary, which scripts and `compare` read; NaN becomes null."""
        write_atomically(self.result, result_text(result))
        return self.result

    def write_ended(self, status: str, error: str) -> None:
        """Record why an unfinished run ended. The result of a finished run is not replaced, and neither is an earlier
        cause. Errors while writing, such as a full disk, are suppressed: they must not hide the cause."""
        if self.read_status() == "running":
            with contextlib.suppress(OSError):
                self.write_result({"status": status, "error": error})

    def read_status(self) -> str | None:
        """The `status` in result.json; None if the file is missing or damaged."""
        return read_object(self.result).get("status")

    def read_samples(self, step: int) -> list[dict[str, Any]]:
        """The answers of the evaluation at `step`; empty if there was none."""
        path = self.answers(step)
        rows, unreadable = read_json_lines(path) if path.exists() else ([], 0)
        if unreadable:
            raise UserError(f"{path}: has {unreadable} unreadable lines; remove it, and go on with --resume auto")
        return rows


def _is_record(record: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(record, dict) and all(type(record.get(key)) is kind for key, kind in _RECORD.items())


def _record_in(card: Path) -> dict[str, Any] | None:
    """The part of a run's record in the card of its exported weights; None if this package did not write the card."""
    import yaml

    try:
        content = yaml.safe_load(read_text(card).partition("\n---\n")[0])
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError):  # any project's README
        return None
    record = content.get("accel_sft") if isinstance(content, dict) else None
    return {**record, "in_card": True} if _is_record(record) else None  # a card's record names no data


def absent_weights(name: str, flag: str) -> list[str]:
    """An error message (in a list) if `name` cannot be a hub id and no such folder exists; else an empty list."""
    folder = expanded(name, flag)
    is_path = not name or name.startswith((".", "/", "~", f"{RUNS}/")) or name.endswith("/") or folder.is_file()
    parent_exists = len(folder.parts) == 2 and folder.parent.is_dir()
    if (name and folder.is_dir()) or not (is_path or parent_exists or len(folder.parts) > 2):
        return []
    return [f"{flag} {name!r}: no such folder; name a run, a folder of saved weights, or a hub id"]


def kept_steps(steps: Sequence[int], keep: str) -> list[int]:
    """Return, in order, the steps whose checkpoints `--keep-checkpoints` keeps."""
    every = keep_every(keep)
    return [step for step in steps if step % every == 0 or step == steps[-1]] if every else [*steps[-int(keep) :]]


def result_text(result: Mapping[str, Any]) -> str:
    """The content of result.json; NaN becomes null."""
    return json.dumps(json_safe(result), indent=2, ensure_ascii=False) + "\n"


def _by_step(folder: Path, suffix: str) -> list[Path]:
    """Return the entries of `folder` that have exactly a step's name, by step; a user's copies have longer names."""
    entries = folder.glob(f"step-*{suffix}")
    mine = (path for path in entries if path.name.removeprefix("step-").removesuffix(suffix).isdecimal())
    return sorted(mine, key=step_of)


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint's folder or of a file of answers."""
    return int(path.stem.removeprefix("step-"))
