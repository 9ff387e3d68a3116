"""Keeps the batching that autotune.py chose, so that every start and every resume uses the same one."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.batching.layouts import Batching
from accel_sft.io.files import write_atomically
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import decided_by_main
from accel_sft.launch.describe import layout_of


def recorded(asked: Sequence[str], batching: Batching) -> dict[str, Any]:
    """The record that a checkpoint and the run's folder keep; `asked` is `--batching` and `--micro-batch-size`."""
    return {"asked": list(asked), "chosen": dataclasses.asdict(batching)}


def restored(record: dict[str, Any] | None, asked: Sequence[str]) -> Batching | None:
    """The recorded batching; None if something else is asked for now, or another version wrote the record."""
    if not record or record.get("asked") != list(asked):
        return None
    return _batching(record.get("chosen"))


def write(accelerator: Accelerator, run_dir: RunDir, asked: Sequence[str], batching: Batching, job: list[Any]) -> None:
    """Keep what a run has chosen, so that a run killed before its first checkpoint resumes with it.

    Args:
        job: what the choice was made for, besides the launch, in a form that JSON can hold.
    """
    record = {**recorded(asked, batching), "layout": layout_of(accelerator), "job": job}
    text = json.dumps(record, indent=2) + "\n"

    def keep() -> None:
        if run_dir.batching.is_dir():
            raise UserError(f"{run_dir.batching}: a folder stands where the batching is recorded; take it away")
        write_atomically(run_dir.batching, text)

    decided_by_main(accelerator, keep)


def read(accelerator: Accelerator, run_dir: RunDir, job: list[Any]) -> dict[str, Any] | None:
    """The record of what the run in this folder chose for this job under this launch; None if none can be read."""

    def found() -> dict[str, Any] | None:
        try:
            text = run_dir.batching.read_text(encoding="utf-8") if run_dir.batching.is_file() else "null"
            record = json.loads(text)
        except (OSError, ValueError, RecursionError):  # broken: the choice is made again and shown
            return None
        here = {"layout": layout_of(accelerator), "job": job}
        return record if isinstance(record, dict) and here.items() <= record.items() else None

    return decided_by_main(accelerator, found)


def _batching(chosen: Any) -> Batching | None:
    named = {field.name for field in dataclasses.fields(Batching)}  # another version's record may have others
    # a run of before the head's pieces were sized has none, and goes on with pieces of MOST_LOGITS
    if not isinstance(chosen, dict) or {"most_logits", *chosen} != named:
        return None
    try:
        batching = Batching(**chosen)
    except (TypeError, ValueError):  # `chosen` names no layout or head of this version
        return None
    counts = [count for count in (batching.tokens, batching.rows, batching.most_logits) if count is not None]
    return batching if all(type(count) is int and count > 0 for count in counts) else None
