"""Command lines in processes that begin with torch imported: to import it takes five of a small run's eight seconds.

They are forked from one that has done nothing but import, as `multiprocessing`'s fork server. What is about imports
themselves, about signals, about what a launcher starts or about an interpreter's end has processes of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_IMPORTED = ["forked_imports"]


def run(arguments: tuple[str, ...], environment: dict[str, str], folder: Path, timeout_seconds: float):
    """`python -m accel_sft` with these arguments; as subprocess.run with what was printed captured, in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    found = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    with mock.patch.dict(os.environ, PYTHONPATH=found):
        forkserver.ensure_running()
    process = context.Process(target=_main, args=(arguments, environment, folder))
    process.start()
    process.join(timeout_seconds)
    if process.exitcode is None:
        process.kill()
        raise subprocess.TimeoutExpired(arguments, timeout_seconds)
    printed = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(arguments, process.exitcode, *printed)


def _main(arguments: tuple[str, ...], environment: dict[str, str], folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.argv = ["accel_sft", *arguments]
    for number, name in enumerate(("stdout", "stderr"), 1):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)

    from accel_sft.__main__ import main

    main()
