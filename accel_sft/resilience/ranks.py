"""Finds out, for ranks of this machine, what a main thread does, if it waits for other ranks, how a lost rank ended."""

import contextlib
import itertools
import os
import re
import signal
import socket
import sysconfig
import traceback
from pathlib import Path
from types import FrameType

import psutil

from accel_sft.io.heartbeat import in_exchange
from accel_sft.launch import host_memory

_WAITING = re.compile(r"/torch/(distributed|cuda)/|/torch/autograd/graph\.py|/deepspeed/(comm|runtime)/")
"""Files of functions in which a rank waits for others: a backward reduces gradients, and a synchronized GPU may itself
wait for other ranks."""
_LIBRARIES = re.compile(
    r"/site-packages/(torch|deepspeed|accelerate|transformers|huggingface_hub|tokenizers|datasets|numpy|pyarrow|safetensors"
    r"|psutil|regex|rich|requests|httpx|urllib3)/"
)


def waits(frame: FrameType) -> bool:
    """Whether the main thread waits for other ranks: in a collective, or for its result on a device."""
    for each, _ in itertools.islice(traceback.walk_stack(frame), 8):
        if _WAITING.search(each.f_code.co_filename):
            return True
    return in_exchange()


def place(frame: FrameType) -> str:
    """The innermost line that is neither Python's own nor a known library's; a task may lie in site-packages, too."""
    standard = sysconfig.get_path("stdlib")
    for each, line in traceback.walk_stack(frame):
        file = each.f_code.co_filename
        own = "site-packages" in file or not file.startswith((standard, "<frozen"))
        if own and not _LIBRARIES.search(file):
            return f"{each.f_code.co_name} ({file}:{line})"
    return "no line of Python"


def _beside() -> list[psutil.Process]:
    """The processes that the launcher of this rank started on this machine."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(os.getppid()).children()
    return []


def process_beside(rank: int) -> psutil.Process | None:
    """The process of another rank that the same launcher started on this machine."""
    for process in _beside():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def state(rank: int, host: str) -> str:
    """The state of a rank's process, as the system reports it."""
    if host not in ("", socket.gethostname()):
        return f"on {host}"
    process = process_beside(rank)
    return f"process {process.pid}, which is {process.status()}" if process else "its process is gone"


def lost_ranks(attempt: Path) -> str:
    """A sentence about the ranks of this machine that ended without recording an error; "" if there are none.

    `attempt` is the folder in which torchrun's ranks of this machine record their errors, by local rank.
    """
    alive, signals = set(), set()
    for process in _beside():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process.environ().get("LOCAL_RANK"))
            else:  # its status as wait() would return it is the last field of proc(5)
                status = Path(f"/proc/{process.pid}/stat").read_text().split()[-1]
                signals.add(int(status) & 0x7F)
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    lost = [n for n in range(count) if str(n) not in alive and not (attempt / str(n) / "error.json").exists()]
    if not alive or not lost:
        return ""
    names = " and ".join(f"rank {first + number}" for number in lost)
    if signals <= {signal.SIGKILL}:
        memory = host_memory.describe()
        return f"{names} was killed (signal 9, as the system does when memory runs out); host memory now: {memory}"
    if signals == {0}:
        return f"{names} ended without an error message"
    ended_by = " and ".join(signal.Signals(number).name for number in sorted(signals - {0}))
    return f"{names} was ended by {ended_by}; its output, if any, is in the run's logs"
