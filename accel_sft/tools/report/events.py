"""Each rank's CPU, memory and GPU over a run: what TensorBoard's events hold and metrics.jsonl does not."""

import re
from collections import defaultdict
from typing import Any

from accel_sft.tools.report.runs import Run

_TAG = re.compile(r"system/rank(\d+)/(\w+)")
Readings = dict[tuple[str, int], dict[int, float]]
"""(field of `system.SYSTEM_FIELDS`, rank) -> step -> reading."""


def system_readings(run: Run) -> Readings:
    """The run's readings, those that a resume took back left out; empty without TensorBoard.

    A file that cannot be read to its end counts as far as it goes, and the run's notes say so.
    """
    paths = sorted(path for path in run.folder.path.glob("events.out.tfevents.*") if path.is_file())
    if not paths:
        return {}
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    readings: Readings = defaultdict(dict)
    for path in paths:
        try:
            for raw in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(raw)
                if event.HasField("session_log") and event.session_log.status == SessionLog.START:
                    _drop_from(readings, event.step)
                for value in event.summary.value:
                    if found := _TAG.fullmatch(value.tag):
                        readings[found[2], int(found[1])][event.step] = _number(value)
        except (OSError, DecodeError, RuntimeError) as error:
            run.notes.append(f"{path.name} is read as far as it goes: {type(error).__name__}")
    return dict(readings)


def _drop_from(readings: Readings, step: int) -> None:
    """A session that starts at a step replaces what was written before from that step on."""
    for curve in readings.values():
        for later in [each for each in curve if each >= step]:
            del curve[later]


def _number(value: Any) -> float:
    """Old writers store a number, new ones a tensor of one."""
    return value.tensor.float_val[0] if value.HasField("tensor") and value.tensor.float_val else value.simple_value
