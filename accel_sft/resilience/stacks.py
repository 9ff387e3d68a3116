"""Where a rank stands: the line its main thread is at, whether it waits there for others, what its process does."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sysconfig
from types import FrameType

import psutil

_WAITING = ("/torch/distributed/", "/deepspeed/comm/", "/torch/autograd/graph.py")
"""Files of functions in which a rank waits for others; gradients are exchanged within a backward."""
_REDUCING = ("reduce_step", "gather_numbers")
"""Functions that wait for the result of a collective where the device runs behind."""
_LIBRARIES = re.compile(
    r"/site-packages/(torch|deepspeed|accelerate|transformers|huggingface_hub|tokenizers|datasets|numpy|pyarrow|safetensors"
    r"|psutil|regex|rich|requests|httpx|urllib3)/"
)


def _frames(frame: FrameType | None) -> list[FrameType]:
    """From the inside out."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def waits(frame: FrameType | None) -> bool:
    """Whether a thread waits for other ranks: in a collective, or, where devices run behind, for its result."""
    for each in _frames(frame)[:8]:
        if any(part in each.f_code.co_filename for part in _WAITING) or each.f_code.co_name in _REDUCING:
            return True
    return False


def place(frame: FrameType | None) -> str:
    """The innermost line that is neither Python's own nor a known library's; a task may be installed as those are."""
    standard = sysconfig.get_path("stdlib")
    for each in _frames(frame):
        file = each.f_code.co_filename
        own = "site-packages" in file or not file.startswith((standard, "<frozen"))
        if own and not _LIBRARIES.search(file):
            return f"{each.f_code.co_name} ({each.f_code.co_filename}:{each.f_lineno})"
    return "no line of Python"


def process_beside(rank: int) -> psutil.Process | None:
    """The process of another rank that the same launcher started on this machine."""
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(os.getppid()).children():
            with contextlib.suppress(psutil.Error):
                if process.environ().get("RANK") == str(rank):
                    return process
    return None


def state(rank: int, host: str) -> str:
    """What the system says of a rank's process."""
    if host not in ("", socket.gethostname()):
        return f"on {host}"
    process = process_beside(rank)
    return f"process {process.pid}, which is {process.status()}" if process else "its process is gone"
