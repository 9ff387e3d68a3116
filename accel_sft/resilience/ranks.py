"""Finds out whether a rank works or waits for other ranks, where its main thread is, and how other ranks ended."""

import contextlib
import itertools
import os
import re
import socket
import sysconfig
import time
import traceback
from pathlib import Path
from types import FrameType

import psutil

from accel_sft.io.heartbeat import in_exchange
from accel_sft.launch import host_memory

_WAITING = re.compile(r"/torch/(distributed|cuda)/|/torch/autograd/graph\.py|/deepspeed/(comm|runtime)/")
"""Source files whose functions may block until other ranks arrive. autograd/graph.py is among them because a backward
reduces gradients, and torch/cuda because a thread that synchronizes with a GPU waits for the GPU's collectives."""
_LIBRARIES = re.compile(
    r"/site-packages/(torch|deepspeed|accelerate|transformers|huggingface_hub|tokenizers|datasets|numpy|pyarrow|safetensors"
    r"|psutil|regex|rich|requests|httpx|urllib3)/"
)


def waits(frame: FrameType) -> bool:
    """Return whether the main thread, now in this frame, waits for other ranks or for a device that waits for them."""
    # 8 frames only: further out, DeepSpeed's engine may just have called the code of a model or a task
    for outer, _ in itertools.islice(traceback.walk_stack(frame), 8):
        if _WAITING.search(outer.f_code.co_filename):
            return True
    return in_exchange()


def place(frame: FrameType) -> str:
    """The innermost line of code outside the standard library and `_LIBRARIES`; "library code" if there is none. Other
    packages in site-packages count, because a task may be installed there."""
    standard = sysconfig.get_path("stdlib")
    for outer, line in traceback.walk_stack(frame):
        file = outer.f_code.co_filename
        own = "site-packages" in file or not file.startswith((standard, "<frozen"))
        if own and not _LIBRARIES.search(file):
            return f"{outer.f_code.co_name} ({file}:{line})"
    return "library code"


def _beside() -> list[psutil.Process]:
    """Return the processes that the launcher of this rank started on this machine, this one included."""
    with contextlib.suppress(psutil.Error):
        return psutil.Process(os.getppid()).children()
    return []


def process_beside(rank: int) -> psutil.Process | None:
    """Return the process of rank `rank`, if this rank's launcher started it on this machine; None otherwise."""
    for process in _beside():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("RANK") == str(rank):
                return process
    return None


def state(rank: int, host: str) -> str:
    """The machine of a rank if it is not this machine; otherwise the state of the rank's process."""
    if host not in ("", socket.gethostname()):
        return f"on {host}"
    process = process_beside(rank)
    return f"process {process.pid}, which is {process.status()}" if process else "its process is gone"


def work(process: psutil.Process) -> tuple[float, int]:
    """The CPU seconds that a process and its children used (not the calling thread's), and the bytes that they wrote to
    files or read from a disk. Neither this function's reads of /proc nor reads of sockets count."""
    seconds, count = 0.0, 0
    children: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        children = process.children(recursive=True)
    for one in (process, *children):
        with contextlib.suppress(psutil.Error):
            times = one.cpu_times()
            seconds += times.children_user + times.children_system
            own = one.pid == os.getpid()  # the system counts in hundredths of a second, the interpreter in nanoseconds
            seconds += time.process_time() - time.thread_time() if own else times.user + times.system
            if hasattr(one, "io_counters"):  # not on macOS
                done = one.io_counters()
                count += done.read_bytes + done.write_chars
    return seconds, count


def lost_ranks(attempt: Path) -> str:
    """A sentence about the ranks of this machine that ended without recording an error in `attempt` (the rank with
    local rank n as n/error.json); "" if there are none."""
    alive = set()
    for process in _beside():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process.environ().get("LOCAL_RANK"))
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    first = int(os.environ.get("RANK", "0")) - int(os.environ.get("LOCAL_RANK", "0"))
    lost = [n for n in range(count) if str(n) not in alive and not (attempt / str(n) / "error.json").exists()]
    if not alive or not lost:
        return ""
    names = " and ".join(f"rank {first + number}" for number in lost)
    how = "without an error message (the launcher's summary may name a signal)"
    return f"{names} ended {how}; host memory now: {host_memory.describe()}"
