"""DeepSpeed's compiled operators: which ones a launch needs, and whether this machine can compile them."""

from __future__ import annotations

import ctypes.util
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from accel_sft.launch.info import Finding, Launch

OPERATORS = {
    "deepspeed_shm_comm": "ranks on a CPU exchange tensors through it, about a minute",
    "cpu_adam": "the optimizer on the host, 1-4 minutes",
    "async_io": "NVMe offload, 1-3 minutes",
}
"""DeepSpeed operators that our configurations need, compiled on first use and kept per user."""

_LOCAL = {"apfs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "overlay", "ramfs", "tmpfs", "xfs", "zfs"}
"""File systems of which this machine alone writes the files."""


def operators(launch: Launch, devices: int) -> list[str]:
    """The DeepSpeed operators this launch needs, by name."""
    if launch.backend != "deepspeed":
        return []
    places = {launch.offload("optimizer"), launch.offload("param")}
    needed = [] if devices else ["deepspeed_shm_comm"]
    needed += ["cpu_adam"] if launch.offload("optimizer") != "none" else []
    return needed + (["async_io"] if "nvme" in places else [])


def audit_operators(launch: Launch, devices: int) -> list[Finding]:
    """Whether this machine can compile the operators: otherwise ninja would fail minutes later."""
    needed = operators(launch, devices)
    if not needed:
        return []
    found = []
    names = ", ".join(needed)
    compiler = os.environ.get("CXX", "c++")
    if not shutil.which(compiler):
        what = f"DeepSpeed compiles {names} here, and there is no C++ compiler ({compiler})"
        found.append(Finding("error", what, "install g++ (apt-get install g++), or use accelerate_configs/ddp.yaml"))
    elif (major := _compiler_major(compiler)) is not None and major < 9:
        what = f"DeepSpeed compiles {names} here, and {compiler} is GCC {major}"
        found.append(Finding("error", what, "GCC 9 or newer is needed; name it in CXX"))
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        what = f"DeepSpeed compiles {names} here, and Python's headers are missing"
        found.append(Finding("error", what, "install python3-dev for this Python (apt-get install python3-dev)"))
    if not shutil.which("ninja"):
        found.append(Finding("error", f"DeepSpeed compiles {names} here, and ninja is missing", "pip install ninja"))
    if "async_io" in needed and not _has_libaio():
        what = "NVMe offload needs libaio with its header, which is missing"
        found.append(Finding("error", what, "apt-get install libaio-dev, or use accelerate_configs/z3_offload.yaml"))
    if devices and "cpu_adam" in needed and not _has_nvcc():
        what = "the offloaded optimizer is compiled against CUDA, and nvcc is missing"
        found.append(Finding("error", what, "install the CUDA toolkit of torch's version and set CUDA_HOME"))
    return found


def audit_compilation(launch: Launch, devices: int) -> list[Finding]:
    """What this launch will wait for: operators not compiled yet, and other launches that compile them.

    The lock of a compilation that was killed is removed: torch would wait for it for ever.
    """
    found, uncompiled = [], []
    for name in operators(launch, devices):
        folder = extensions_folder() / name
        lock = folder / "lock"
        if _abandoned(lock):
            lock.unlink(missing_ok=True)
            what = f"{lock}: a compilation of {name} was killed and left it behind"
            found.append(Finding("note", what, "it is removed"))
        if lock.exists() and time.time() - lock.stat().st_mtime > 60:  # younger: another rank of this launch
            what = f"{lock}: another process compiles {name}; this run will wait for it"
            found.append(Finding("warning", what, "delete the file if no other launch is running"))
        elif not (folder / f"{name}.so").is_file():
            uncompiled.append(f"{name} ({OPERATORS[name]})")
    if uncompiled:
        what = f"DeepSpeed compiles on first use, once per machine, {', '.join(uncompiled)}"
        found.append(Finding("note", what, "nothing to do but wait"))
    return found


def _abandoned(lock: Path) -> bool:
    """Whether nobody compiles behind this lock: its maker would hold it open, and ninja would run in its folder.

    False for another user's lock, and for one that a process on another machine may have made.
    """
    import psutil

    for attempt in range(2):  # its maker closes it a moment before it removes it
        if attempt:
            time.sleep(1)
        try:
            if lock.stat().st_uid != os.getuid():
                return False
            places = [(Path(part.mountpoint), part.fstype) for part in psutil.disk_partitions(all=True)]
            folder = lock.parent.resolve()
        except (OSError, AttributeError):  # there is no lock, or Windows
            return False
        mounts = [(len(place.parts), kind) for place, kind in places if folder.is_relative_to(place)]
        if not mounts or max(mounts)[1] not in _LOCAL:
            return False
        for process in psutil.process_iter(["cwd", "open_files"]):
            opened = [file.path for file in process.info["open_files"] or []]
            if process.info["cwd"] == str(folder) or str(folder / lock.name) in opened:
                return False
    return True


def extensions_folder() -> Path:
    """Where torch keeps compiled operators, per Python and CUDA version."""
    named = os.environ.get("TORCH_EXTENSIONS_DIR")
    if named:
        return Path(named)
    import torch

    kind = "cpu"
    if torch.version.hip or torch.version.cuda:
        kind = f"rocm{torch.version.hip}" if torch.version.hip else f"cu{torch.version.cuda}"
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return cache / "torch_extensions" / f"{python}_{kind.replace('.', '')}"


@functools.cache
def _compiler_major(compiler: str) -> int | None:
    """GCC's major version, None for another compiler (Clang answers --version differently)."""
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    if "Free Software Foundation" not in answer:
        return None
    numbers = re.search(r"(\d+)\.\d+\.\d+", answer)
    return int(numbers.group(1)) if numbers else None


def _has_libaio() -> bool:
    named = re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", "")) + os.environ.get("CPATH", "").split(":")
    folders = [*filter(None, named), "/usr/include", "/usr/local/include", sysconfig.get_paths()["data"] + "/include"]
    return any(Path(folder, "libaio.h").is_file() for folder in folders) and bool(
        ctypes.util.find_library("aio") or os.environ.get("LDFLAGS")
    )


def _has_nvcc() -> bool:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    return bool(shutil.which("nvcc")) or Path(home, "bin", "nvcc").is_file()
