"""Sets the environment variables that libraries read at import: threads, log levels, a PATH with ninja. No torch."""

import contextlib
import ctypes
import gc
import math
import os
import sysconfig
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.launcher import launcher_command
from accel_sft.launch.rank_environment import launcher_flags

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",  # a fork after its threads have started may hang; ranks share the cores
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


GAPS = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Lets torch's allocator fill the gaps that forwards of different lengths leave in a GPU's memory."""


def prepare_environment(debug: bool = False) -> None:
    """Set what libraries read at import: threads, log levels, and a PATH on which pip's ninja is found.

    Call it before torch, transformers or deepspeed are imported. A variable the user has set is left alone.

    Raises:
        UserError: the variables of a rank have values that no launcher gives.
    """
    _check_ranks()
    # importing torch and transformers makes 400,000 objects that stay: collecting as often as usual is 10% of a start
    gc.set_threshold(10_000, 20, 20)
    os.environ["OMP_NUM_THREADS"] = str(threads_per_process())  # DeepSpeed's CPU Adam has an OpenMP of its own
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads spin while they wait for each other, by default for so long that any other program on a core
        # makes small products a hundred times slower; spinning this long costs nothing on a quiet machine
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    _keep_freed_memory()
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the variable's newer name
        os.environ.setdefault(*GAPS)
    scripts = sysconfig.get_path("scripts")
    if Path(scripts, "ninja").is_file():
        # this Python's ninja comes before the system's: a ninja of another version compiles all operators anew
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    for name, value in ({} if debug else _QUIET).items():
        os.environ.setdefault(name, value)


def _check_ranks() -> None:
    """Raises UserError if the variables that a launcher sets are left over or were set by hand, not by a launcher."""
    least = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    given = {name: os.environ[name] for name in least if name in os.environ}
    wrong = [name for name, value in given.items() if not value.isdecimal() or int(value) < least[name]]
    if not wrong and int(given.get("WORLD_SIZE", "1")) > 1:
        wrong = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if wrong:
        found = ", ".join(f"{name} is {given[name]!r}" if name in given else f"{name} is not set" for name in wrong)
        raise UserError(f"{found}: unset WORLD_SIZE and RANK for one process, or start ranks with accelerate launch")


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed for the next step, instead of giving it back and having each page zeroed again.

    Tensors of a few megabytes otherwise cost a fifth to a half of a training step on a CPU. Other C libraries have no
    such call, and an allocator loaded in glibc's place ignores it. The options' numbers are <malloc.h>'s M_*.
    """
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((mmap_threshold, 32 << 20), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20)):
            mallopt(option, size)


def threads_per_process() -> int:
    """Compute threads of one rank: this machine's usable cores shared among its ranks, at least one.

    The launcher gives each of several ranks a single thread, which leaves cores idle. A number that the user asked for
    is kept: `--num_cpu_threads_per_process`, or OMP_NUM_THREADS (under a launcher, which sets it to 1, only above 1).
    """
    asked = launcher_flags(launcher_command()[0]).get("num_cpu_threads_per_process")
    named = asked or os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and (int(named) > 1 or asked or "WORLD_SIZE" not in os.environ):
        return max(int(named), 1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return max(1, usable_cores() // ranks)


def usable_cores() -> int:
    """Physical cores that this process may use: its affinity mask and a container's quota are counted."""
    import psutil

    limits = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    quota = host_memory.SYSTEM / "sys/fs/cgroup/cpu.max"
    if quota.is_file():
        allowed, period = quota.read_text().split()
        limits += [] if allowed == "max" else [math.ceil(int(allowed) / int(period))]
    return max(1, min(limits))
