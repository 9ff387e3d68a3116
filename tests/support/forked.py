"""Command lines in processes that begin with everything imported: to import it takes five of a small run's eight
seconds, and twelve of the sixteen that a small launch of two ranks takes.

They are forked from one that has done nothing but import, as `multiprocessing`'s fork server. Of a launch this much is
real: Accelerate's launcher with its flags and yaml, torchrun's agent and its summary, one process and group for each
rank with the environment that the two hand it, and all that the rank then does. What is not: nothing is imported again,
a rank shares the launcher's hash seed, and the system shows neither the command line nor the environment of any of
them, so the launcher's command line is told to the ranks, and ranks that fail do not find each other. What is about
imports themselves, about signals, kills and ranks that are lost, about what a launcher starts or about an interpreter's
end has processes of its own.
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
"""The launcher's own environment, before it sets what its ranks get."""


def run(command: tuple[str, ...], environment: dict[str, str], folder: Path):
    """`accelerate-launch ...`, `torchrun ...`, or `accel_sft ...` alone; as subprocess.run with its output captured."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    found = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=found):
        forkserver.ensure_running()
    process = context.Process(target=_main, args=(command, environment, folder))
    process.start()
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
    """In place of a `Popen` of a rank's command, `python -u -m MODULE ...`: one of a fork that goes on with it."""
    told = command, environment, sys.argv, _launchers
    process = multiprocessing.get_context("fork").Process(target=_rank, args=told)
    process.start()
    return process._popen


def _rank(command: tuple[str, ...], environment: dict[str, str], launch: list[str], launchers: dict[str, str]) -> None:
    import psutil

    from accel_sft.launch import info
    from accel_sft.resilience import signals

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    info.PARENT = signals.PARENT = os.getppid()
    launcher = SimpleNamespace(cmdline=lambda: launch, cwd=os.getcwd, environ=lambda: launchers)
    psutil.Process.parents = lambda process: [launcher]
    sys.argv = list(command[command.index("-m") + 1 :])
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
