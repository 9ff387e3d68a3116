"""Short programs that a process of its own runs, as a rank would."""

from __future__ import annotations

import os
import subprocess
import sys

from places import SUPPORT

PREAMBLE = """
import ctypes, os, signal, socket, sys, time
from pathlib import Path
import psutil
from limits import limit
from accel_sft.api.errors import UserError
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience import exit, peers, ranks, signals, watchdog

def wait_in_c():  # as a collective of a GPU, it hears no signal and no lost connection
    mutex = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)

"""
"""What these programs may use."""


def started(program: str, *arguments: object, **environment: str) -> subprocess.Popen[str]:
    """The program with its arguments, in the background; `environment` are variables beside the test's own."""
    path = os.pathsep.join((str(SUPPORT), os.environ["PYTHONPATH"]))
    command = [sys.executable, "-c", PREAMBLE + program, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, **environment}, **pipes)


def run(program: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program, once it has ended."""
    with started(program, *arguments, **environment) as process:
        printed = process.communicate()
    return subprocess.CompletedProcess(process.args, process.returncode, *printed)
