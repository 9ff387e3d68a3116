"""DeepSpeed's compiled operators: which ones a launch needs, and whether this machine can compile them."""

import contextlib
import ctypes.util
import math
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from accel_sft.api.errors import UserError
from accel_sft.io.findings import Finding, error, warning
from accel_sft.io.terminal import waiting
from accel_sft.launch.info import Launch

OPERATORS = {
    "cpu_adam": "the optimizer on the host, 1-4 minutes",
    "async_io": "NVMe offload, 1-3 minutes",
}
"""DeepSpeed operators that our configurations need, compiled on first use and cached per user. The values say what the
operator is for and how long it compiles."""

_UNUSED = "deepspeed_shm_comm"
"""Operator that DeepSpeed compiles for every group of CPU ranks. Only `inference_all_reduce` uses it, and training
never calls that function."""


def operators(launch: Launch) -> list[str]:
    """Return the names of the DeepSpeed operators that this launch needs; [] without DeepSpeed."""
    if launch.backend != "deepspeed":
        return []
    optimizer, param = launch.offload("optimizer"), launch.offload("param")
    needed = {"cpu_adam": optimizer != "none", "async_io": "nvme" in (optimizer, param)}
    return [name for name in OPERATORS if needed[name]]


def spare_unused_operator() -> None:
    """Keep DeepSpeed from compiling the operator `_UNUSED` for CPU ranks: mark it as incompatible in DeepSpeed's own
    table (which `ds_report` prints)."""
    import deepspeed

    deepspeed.ops.__compatible_ops__[_UNUSED] = False


def audit_compilers(needed: list[str], devices: int) -> Iterator[Finding]:
    """Yield an error for each compiler, header or library that this machine lacks to compile these operators."""
    if not needed:
        return
    compiled = f"DeepSpeed must compile {', '.join(needed)}, but"
    missing, compiler = [*lacking("CXX", "c++")], os.environ.get("CXX", "c++")
    for problem, fix in missing:
        yield error(f"{compiled} {problem}", fix)
    if not missing and (major := _gcc_major(compiler)) < 9:
        yield error(f"{compiled} {compiler} is GCC {major}", "install GCC 9 or newer, and name it in CXX")
    if "async_io" in needed and not _has_libaio():
        fix = "apt-get install libaio-dev, or use accelerate_configs/z3_offload.yaml"
        yield error("NVMe offload needs libaio with its header, which is missing", fix)
    # only for async_io: DeepSpeed compiles cpu_adam without CUDA, even on a machine with GPUs
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    if devices and "async_io" in needed and not (shutil.which("nvcc") or Path(home, "bin", "nvcc").is_file()):
        fix = "install the CUDA toolkit of torch's version and set CUDA_HOME, or use accelerate_configs/z3_offload.yaml"
        yield error("NVMe offload is compiled against CUDA, and nvcc is missing", fix)


def lacking(variable: str, usual: str) -> Iterator[tuple[str, str]]:
    """Yield what this machine lacks to compile a Python extension (compiler or headers), each with its fix. The
    compiler is the one that the environment variable names, else the usual one."""
    compiler = os.environ.get(variable, usual)
    if not shutil.which(compiler):
        yield f"there is no compiler ({compiler})", f"apt-get install g++, or name a compiler in {variable}"
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        yield "Python's headers are missing", "apt-get install python3-dev"


def audit_locks(name: str) -> Iterator[Finding]:
    """Yield a warning if this operator is locked: another process is compiling it, or was killed while it compiled. In
    the latter case torch would wait forever."""
    lock = library(name).with_name("lock")
    if lock.exists() and time.time() - lock.stat().st_mtime > 60:  # a younger lock may belong to a rank of this launch
        fix = "delete the file if no other launch is running"
        yield warning(f"{lock}: another process compiles {name}; this run will wait for it", fix)


def compiling(launch: Launch) -> contextlib.AbstractContextManager[None]:
    """Context manager in which DeepSpeed may compile this launch's missing operators; shows the time taken."""
    lacking = [f"{name} ({OPERATORS[name]})" for name in operators(launch) if not library(name).is_file()]
    what = f"DeepSpeed compiles, once per machine, {', '.join(lacking)}"
    return waiting(what) if lacking else contextlib.nullcontext()


def library(name: str) -> Path:
    """Return the path of the compiled operator. The call makes its folder, where torch also keeps a lock file."""
    from torch.utils.cpp_extension import _get_build_directory

    try:
        return Path(_get_build_directory(name, verbose=False), f"{name}.so")
    except OSError as problem:
        raise UserError(
            f"{problem.filename}: DeepSpeed's {name} cannot be written there ({problem.strerror}); make the folder "
            "writable, or set TORCH_EXTENSIONS_DIR"
        ) from None


def _gcc_major(compiler: str) -> float:
    """GCC's major version, infinite for another compiler (Clang answers --version differently)."""
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    numbers = re.search(r"(\d+)\.\d+\.\d+", answer)
    return int(numbers[1]) if numbers and "Free Software Foundation" in answer else math.inf


def _has_libaio() -> bool:
    named = re.findall(r"-I\s*(\S+)", os.environ.get("CFLAGS", "")) + os.environ.get("CPATH", "").split(":")
    folders = [*filter(None, named), "/usr/include", "/usr/local/include", sysconfig.get_paths()["data"] + "/include"]
    return any(Path(folder, "libaio.h").is_file() for folder in folders) and bool(
        ctypes.util.find_library("aio") or os.environ.get("LDFLAGS")
    )
