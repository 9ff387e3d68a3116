"""Runs command lines in processes forked from one that has only made imports, which take most of a small run's time.

Real in a launch are Accelerate's launcher with its flags and yaml, torchrun's agent and its summary, a process and
process group for each rank with the environment that both give it, and everything that the rank does. Not real:
nothing is imported again, a rank has the launcher's hash seed, and the system shows neither the command line nor the
environment of these processes. So the ranks are told the launcher's command line, and failing ranks do not find each
other: tests of imports, signals, kills, lost ranks, or an interpreter's end use ordinary processes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

LAUNCH, TORCHRUN = "accelerate-launch", "torchrun"
_IMPORTED = ["forked_imports"]
_launchers: dict[str, str] = {}
"""The launcher's own environment, before it adds the variables for its ranks."""


def start(command: tuple[str, ...], environment: dict[str, str], folder: Path):
    """Start `accelerate-launch ...`, `torchrun ...` or plain `accel_sft ...`, which prints into files of `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    found = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=found):
        forkserver.ensure_running()
    process = context.Process(target=_main, args=(command, environment, folder))
    process.start()
    return process


def run(command: tuple[str, ...], environment: dict[str, str], folder: Path):
    """Run such a command to its end, like subprocess.run capturing output."""
    process = start(command, environment, folder)
    process.join()
    printed = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, process.exitcode, *printed)


def _main(command: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    _launchers.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = list(command)
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    if command[0] in (LAUNCH, TORCHRUN):
        from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

        SubprocessHandler._popen = _start_rank
    if command[0] == LAUNCH:
        from accelerate.commands.launch import main
    elif command[0] == TORCHRUN:
        from torch.distributed.run import main
    else:
        from accel_sft.__main__ import main

    main()


def _start_rank(_: object, command: tuple[str, ...], environment: dict[str, str]):
    """Replaces the `Popen` of a rank's command (`python -u -m MODULE ...`) by a forked process that runs it."""
    told = command, environment, sys.argv, _launchers
    process = multiprocessing.get_context("fork").Process(target=_rank, args=told)
    process.start()
    return process._popen


def _rank(command: tuple[str, ...], environment: dict[str, str], launch: list[str], launchers: dict[str, str]) -> None:
    import psutil

    from accel_sft.resilience import signals

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    signals.PARENT = os.getppid()
    launcher = SimpleNamespace(cmdline=lambda: launch, cwd=os.getcwd, environ=lambda: launchers)
    psutil.Process.parents = lambda process: [launcher]
    sys.argv = list(command[command.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
