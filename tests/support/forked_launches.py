"""Launches of tools: found by their mark, or forked from a process with all imports made (forked.py), which takes a
quarter of the time; a forked launch of one process can be killed all the same."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
import time
from pathlib import Path

import forked
import psutil

from accel_sft.launch.child import MARK, Ended

_LAUNCHERS = {"accelerate.commands.launch": forked.LAUNCH, "torch.distributed.run": forked.TORCHRUN}
_running: list[multiprocessing.Process] = []


def use(monkeypatch, module) -> None:
    """Replace what starts and what kills a launch in a tool's module."""
    monkeypatch.setattr(module, "launch", _launch)
    monkeypatch.setattr(module, "kill_all", lambda folder: _running[-1].kill(), raising=False)


def _launch(command, environment, folder: Path, log: Path, limit_seconds, on_poll, poll_seconds=0.05) -> Ended:
    began = time.monotonic()
    words = command[command.index("-m") + 1 :]
    with tempfile.TemporaryDirectory() as printed:
        words = (_LAUNCHERS.get(words[0], words[0]), *words[1:])
        _running.append(forked.start(words, {**os.environ, **environment}, Path(printed)))
        while _running[-1].is_alive():
            _running[-1].join(poll_seconds)
            on_poll()
        log.write_bytes(b"".join((Path(printed) / name).read_bytes() for name in ("stdout", "stderr")))
    return Ended(_running.pop().exitcode, time.monotonic() - began, over_time=False)


def marked(folder: Path) -> list[psutil.Process]:
    """Processes of any launch below this folder."""
    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(str(folder)):
                processes.append(process)
    return processes
