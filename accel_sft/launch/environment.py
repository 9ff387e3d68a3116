"""Sets environment variables that libraries read at import: threads, log levels, PATH. Imported without torch."""

import atexit
import contextlib
import ctypes
import gc
import math
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.launcher import launcher_command, launcher_flags

_QUIET = {
    "TOKENIZERS_PARALLELISM": "false",  # its threads take the ranks' cores, and a process forked after them may hang
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

_THREADS = "OMP_NUM_THREADS"
_before: dict[str | None, str | None] = {}
"""Maps each value that `share_cores` has set in OMP_NUM_THREADS to the user's value."""
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
"""Lets the GPU's allocator fill the gaps that forwards of different lengths leave. Do not add
pinned_max_round_threshold_mb, an option of torch 2.13 that pins host memory without rounding: a request may then get a
cached block that is too small, and a copy writes past the block's end."""
WITHOUT_CUDNN = ("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
"""Makes cuDNN's attention torch's last choice. On H100 and B200 torch prefers cuDNN, which spends 20 to 40 ms
on each new shape, and forwards here seldom share a shape. `create_accelerator` also turns cuDNN's attention off."""


def prepare_environment(debug: bool = False) -> None:
    """Set the variables that libraries read at import: threads, log levels, and a PATH with pip's ninja. Variables set
    by the user do not change, except PATH and OMP_NUM_THREADS (see `threads_per_process`)."""
    _check_ranks()
    # importing torch and transformers makes 400,000 objects that stay; with Python's usual thresholds the garbage
    # collector would take 10% of the time that a command needs to start
    gc.set_threshold(10_000, 20, 20)
    share_cores()
    if "OMP_WAIT_POLICY" not in os.environ:
        # OpenMP's threads spin while they wait for each other, by default for so long that another program on one core
        # makes small matrix products a hundred times slower. 5000 spins avoid that, and cost nothing on an idle machine
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
    _keep_freed_memory()
    if "PYTORCH_ALLOC_CONF" not in os.environ:  # the variable's newer name
        os.environ.setdefault(*ALLOCATOR)
    os.environ.setdefault(*WITHOUT_CUDNN)
    scripts = sysconfig.get_path("scripts")
    if Path(scripts, "ninja").is_file():
        # this Python's ninja comes first: a ninja of another version would compile all operators again
        os.environ["PATH"] = os.pathsep.join((scripts, os.environ.get("PATH", "")))
    for name, value in ({} if debug else _QUIET).items():
        os.environ.setdefault(name, value)
    if Path("z3").is_dir():
        # `--compile` imports the solver z3 if there is one, and would take a run's folder of this name for it
        sys.modules.setdefault("z3", None)  # type: ignore[arg-type]


def for_launches() -> dict[str, str]:
    """Return the variables for a launch that this process starts. OMP_NUM_THREADS gets the user's value back: otherwise
    each rank would take this process's own value (all cores) for the user's."""
    now = os.environ.get(_THREADS)
    variables = {**os.environ, _THREADS: _before.get(now, now)}
    return {name: value for name, value in variables.items() if value is not None}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Context manager for imports: stops garbage collections, which would take 8% of the time, and excludes the
    imported objects from later collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.freeze()
        atexit.register(_collect_for_triton)


def _collect_for_triton() -> None:
    """Let the interpreter's end free all objects if Triton is loaded, which would print those that are left."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _check_ranks() -> None:
    """Raise UserError if a launcher's variables are missing or impossible: they may be left over or set by hand."""
    least = {"WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
    given = {name: os.environ[name] for name in least if name in os.environ}
    wrong = [f"{k} is {v!r}" for k, v in given.items() if not v.isdecimal() or int(v) < least[k]]
    if not wrong and int(given.get("WORLD_SIZE", "1")) > 1:
        wrong = [f"{k} is not set" for k in ("RANK", "MASTER_ADDR", "MASTER_PORT") if k not in os.environ]
    if wrong:
        raise UserError(f"{', '.join(wrong)}: unset {', '.join(given)} to start one process, or use accelerate launch")


def _keep_freed_memory() -> None:
    """Make glibc keep freed memory. If it went back to the kernel, which zeroes pages, allocating tensors of a few
    megabytes would take a fifth to a half of a step on a CPU. The options are M_* of <malloc.h>."""
    mmap_threshold, trim_threshold, top_pad = -3, -1, -2
    with contextlib.suppress(AttributeError, OSError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, size in ((mmap_threshold, 32 << 20), (trim_threshold, 2**31 - 1), (top_pad, 64 << 20)):
            mallopt(option, size)


def share_cores() -> None:
    """Write this rank's number of threads into OMP_NUM_THREADS; call it again when the number of ranks has changed.

    torch.set_num_threads() alone would not suffice: DeepSpeed's CPU Adam has an OpenMP runtime of its own.
    """
    given = for_launches().get(_THREADS)
    os.environ[_THREADS] = given or ""
    threads = str(threads_per_process())
    os.environ[_THREADS], _before[threads] = threads, given


def threads_per_process() -> int:
    """How many threads a rank computes with: the user's number (`--num_cpu_threads_per_process`, OMP_NUM_THREADS), else
    its share of the usable cores. Under a launcher OMP_NUM_THREADS=1 does not count, because launchers set it."""
    flag = launcher_flags(launcher_command()[0]).get("num_cpu_threads_per_process")
    named = flag or os.environ.get("OMP_NUM_THREADS", "")
    if named.isdecimal() and (int(named) > 1 or flag or "WORLD_SIZE" not in os.environ):
        return max(int(named), 1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    return max(1, usable_cores() // ranks)


def device_count() -> int:
    """Return how many accelerators ranks can be spread over; 0 for Apple's MPS, which has no collectives."""
    import torch

    if not torch.accelerator.is_available():  # checked first: without one, torch 2.6 raises in the call below
        return 0
    device = torch.accelerator.current_accelerator()
    return torch.accelerator.device_count() if device is not None and device.type != "mps" else 0


def usable_cores() -> int:
    """Return how many physical cores this process may use, within its affinity mask and its cgroups' CPU quotas."""
    import psutil

    limits = [psutil.cpu_count(logical=False) or os.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    for folder in host_memory.cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):  # no quota: "max", or cgroup v1, which has no cpu.max
            allowed, period = (folder / "cpu.max").read_text().split()
            limits.append(math.ceil(int(allowed) / int(period)))
        with contextlib.suppress(OSError, ValueError):
            allowed, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
            limits += [math.ceil(int(allowed) / int(period))] if int(allowed) > 0 else []  # -1: no quota
    return max(1, min(limits))
