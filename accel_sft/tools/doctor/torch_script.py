"""What `doctor` runs in separate processes: one collects facts about torch, others are the ranks of an all-reduce.

A broken driver or library may crash or hang a process. Each fact is printed at once, so earlier facts still count.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

from accel_sft.api.errors import first_line
from accel_sft.launch.audit import NVIDIA
from accel_sft.tools.doctor.machine import LIBRARIES

ROUNDS = 5
"""Number of timed rounds of the copies; the fastest counts."""
COPIED = 1 << 28
"""Number of bytes copied between host and GPU, which takes about ten milliseconds."""
ELEMENTS = 1 << 20
"""How many numbers each rank contributes to the all-reduce."""


def tell(**facts: Any) -> None:
    print(json.dumps(facts), file=_facts, flush=True)


def facts() -> None:
    """Print the facts of `machine.TorchFacts`."""
    tell(step="ask the driver")
    _driver()
    tell(step="import torch")
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a missing or broken library may raise anything
        tell(imports={"torch": _words(error)})
        return
    tell(version=torch.__version__, cuda=torch.version.cuda, imports={"torch": ""})
    _devices(torch)
    for name in LIBRARIES[1:]:
        tell(step=f"import {name}")
        try:
            import_module(name)
            tell(imports={name: ""})
        except Exception as error:  # noqa: BLE001 - a library may raise anything
            tell(imports={name: _words(error)})
    tell(step="load DeepSpeed's operators")
    _operators()


def _driver() -> None:
    """Print what NVML says about the driver and all GPUs, including those that CUDA_VISIBLE_DEVICES hides."""
    import pynvml as nvml

    try:
        nvml.nvmlInit()
        tell(driver=nvml.nvmlSystemGetDriverVersion(), driver_cuda=nvml.nvmlSystemGetCudaDriverVersion_v2())
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError as error:
        if NVIDIA.exists() or not isinstance(error, nvml.NVMLError_LibraryNotFound):
            tell(driver_failure=str(error))
        return
    for index, handle in enumerate(handles):
        row = {"name": nvml.nvmlDeviceGetName(handle)}
        with contextlib.suppress(nvml.NVMLError):  # not supported where a GPU shares the host's memory
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            row |= {"total": memory.total, "used": memory.used}
        with contextlib.suppress(nvml.NVMLError):  # not supported by a MIG slice
            row |= {"busy": nvml.nvmlDeviceGetUtilizationRates(handle).gpu}
        tell(driver_gpus={str(index): row})


def _devices(torch: Any) -> None:
    from accel_sft.launch.environment import device_count
    from accel_sft.launch.precision import computes_bf16

    tell(step="find the GPUs")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count = device_count()
    if not count:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as a launch does
    cuda = count if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(cuda)]
    complaint = str(caught[0].message).strip().partition("\n")[0] if caught and not count else ""
    tell(device_count=count, device_names=names, cuda_complaint=complaint)
    tell(step="compute on each device")
    failures = {}
    for index in range(cuda):
        try:
            matrix = torch.ones(64, 64, device=f"cuda:{index}")
            (matrix @ matrix).sum().item()
        except RuntimeError as error:
            failures[str(index)] = _words(error)
    tell(device_failures=failures)
    if failures or cuda != count:
        return
    tell(step="copy between host and GPUs")
    for index in range(cuda):
        speeds: dict[str, float] = {}
        with contextlib.suppress(RuntimeError):  # its memory may be full; the check of GPUs reports that
            speeds = _copies(torch, f"cuda:{index}")
        tell(copies={str(index): speeds})
    native, why = computes_bf16(torch.device("cuda:0" if cuda else "cpu"))
    tell(bf16_native=native, bf16_why=why)


def _copies(torch: Any, device: str, pinned: bool = True) -> dict[str, float]:
    """GB/s from the host's pinned memory (which data loaders and offload use) to the device, and back."""
    on_device = torch.empty(COPIED, dtype=torch.uint8, device=device)
    on_host = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=pinned)
    wait = functools.partial(torch.cuda.synchronize, device) if pinned else lambda: None
    speeds = {}
    for way, to, source in (("from", on_device, on_host), ("to", on_host, on_device)):
        times = []
        for _ in range(1 + ROUNDS):
            wait()
            began = time.perf_counter()
            to.copy_(source)
            wait()
            times.append(time.perf_counter() - began)
        speeds[way] = COPIED / min(times[1:]) / 1e9  # the first warms up
    return speeds


def _operators() -> None:
    """Print which operators are compiled in the folder that this user's launches use, and whether they load."""
    from torch.utils.cpp_extension import _import_module_from_library

    from accel_sft.launch.deepspeed_ops import OPERATORS, audit_locks, library

    for name in OPERATORS:
        state: dict[str, Any] = {"library": str(library(name)), "compiled": library(name).is_file(), "failure": ""}
        state["locks"] = [[finding.what, finding.fix] for finding in audit_locks(name)]
        if state["compiled"]:
            try:
                _import_module_from_library(name, str(library(name).parent), True)
            except (ImportError, OSError) as error:
                state["failure"] = _words(error)
        tell(operators={name: state})


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def rank(backend: str, seconds: str) -> None:
    """Add up numbers with the other ranks (an all-reduce). If that fails, print why and exit with status 1."""
    import datetime

    import torch
    from torch import distributed

    signal.alarm(int(seconds))  # SIGALRM's default action ends this process even while it waits in C++
    number, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    failure = ""
    try:
        if backend == "nccl":
            torch.cuda.set_device(number)
        distributed.init_process_group(backend, timeout=datetime.timedelta(seconds=2 * int(seconds)))
        device = "cuda" if backend == "nccl" else "cpu"
        numbers = torch.full((ELEMENTS,), float(number + 1), device=device)
        distributed.all_reduce(numbers)
        if not (numbers == ranks * (ranks + 1) / 2).all():
            failure = "the sum is wrong"
        distributed.barrier()
    except (RuntimeError, ValueError) as error:  # torch's DistError is a RuntimeError
        failure = first_line(error)
    if failure:
        # ranks share the pipe, so the line and its line break are one write; an unbuffered print() makes two
        sys.stdout.write(f"rank {number}: {failure}\n")
        sys.stdout.flush()
    # destroying the group would hold the GIL until gloo's threads end, and they may wait for the GIL
    os._exit(bool(failure))


if __name__ == "__main__":
    if sys.argv[1] == "facts":
        _facts = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever the libraries print must not mix with the facts
    entries: dict[str, Callable[..., None]] = {"facts": facts, "rank": rank}
    entries[sys.argv[1]](*sys.argv[2:])
