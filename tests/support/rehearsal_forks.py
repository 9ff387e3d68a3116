"""Has a rehearsal's launches of one process fork from one with all imports made (forked.py), which takes a quarter of
the time; they are killed and resumed all the same."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import forked

from accel_sft.launch.child import Ended
from accel_sft.tools.rehearse import runs

_running: list[multiprocessing.Process] = []


def use(monkeypatch) -> None:
    """Replace what starts and what kills a launch."""
    monkeypatch.setattr(runs, "launch", _launch)
    monkeypatch.setattr(runs, "kill_all", lambda folder: _running[-1].kill())


def _launch(command, environment, folder: Path, log: Path, limit_seconds, on_poll, poll_seconds) -> Ended:
    printed = log.with_suffix(".printed")
    printed.mkdir()
    began = time.monotonic()
    words = ("accel_sft", *command[command.index("accel_sft") + 1 :])
    _running.append(forked.start(words, {**os.environ, **environment}, printed))
    while _running[-1].is_alive():
        _running[-1].join(poll_seconds)
        on_poll()
    log.write_bytes(b"".join((printed / name).read_bytes() for name in ("stdout", "stderr")))
    return Ended(_running.pop().exitcode, time.monotonic() - began, over_time=False)
