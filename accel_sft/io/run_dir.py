"""What the files of a run's folder say of the run. Standard library only."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.io.files import json_safe, read_json, write_atomically


def write_result(run_dir: Path, result: Mapping[str, Any]) -> Path:
    """Write the run's summary to `run_dir/result.json`, what scripts and the comparison read; nan becomes null."""
    path = Path(run_dir) / "result.json"
    write_atomically(path, json.dumps(json_safe(result), indent=2, ensure_ascii=False) + "\n")
    return path


def write_ended(run_dir: Path, status: str, error: str) -> None:
    """Say why a run ended that was under way: not over a finished one's numbers, and of several causes the first.

    A disk that is full or gone must not hide the cause itself.
    """
    if read_status(run_dir) == "running":
        with contextlib.suppress(OSError):
            write_result(run_dir, {"status": status, "error": error})


def run_record(model: str) -> dict[str, Any] | None:
    """The run.json of the run that `model` is, or is a folder of; None if it is something else."""
    folder = Path(model).expanduser()
    record = next((path for path in (folder / "run.json", folder.parent / "run.json") if path.is_file()), None)
    return read_json(record) if record else None


def read_status(run_dir: Path) -> str | None:
    """The `status` in a run's result.json; None where there is none yet."""
    path = Path(run_dir) / "result.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))["status"]
    except (OSError, ValueError, KeyError, TypeError):  # not there, or broken off by whoever copied it: not a result
        return None


def read_samples(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The answers of a run's evaluation at `step`, as the tracker wrote them; none if there was none."""
    path = Path(run_dir) / "samples" / f"step-{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
