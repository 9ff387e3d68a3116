"""Reads each rank's CPU, memory and GPU use from TensorBoard's event files, since metrics.jsonl does not have them."""

import re
from collections import defaultdict

from accel_sft.tools.report.runs import Run

_TAG = re.compile(r"system/rank(\d+)/(\w+)")
Readings = dict[tuple[str, int], dict[int, float]]
"""Readings by step, of each (field of `system.SYSTEM_FIELDS`, rank)."""


def system_readings(run: Run) -> Readings:
    """Return the run's readings, without those that a resumed run made anew; empty if there are no event files.

    A file that is damaged is read as far as possible, and the run's notes say so.
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
                        readings[found[2], int(found[1])][event.step] = value.simple_value
        except (OSError, DecodeError, RuntimeError) as error:
            run.notes.append(f"{path.name} is read as far as it goes: {type(error).__name__}")
    return dict(readings)


def _drop_from(readings: Readings, step: int) -> None:
    """Drop the readings from a step on: a session that starts there replaces them."""
    for curve in readings.values():
        for later in [each for each in curve if each >= step]:
            del curve[later]
