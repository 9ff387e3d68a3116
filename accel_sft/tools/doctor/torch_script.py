"""A script that prints what torch and DeepSpeed can do here, as lines of JSON; `torch_facts` starts and reads it.

A broken driver or library may crash or hang the process that uses it; the lines printed before that still count.
"""

import contextlib
import functools
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any

from accel_sft.api.errors import first_line
from accel_sft.tools.doctor.torch_facts import LIBRARIES

ROUNDS = 5
"""Timed rounds of the matrix products and copies; the fastest counts."""
COPIED = 1 << 28
"""Bytes of a copy between host and GPU: it takes some ten milliseconds."""
LOOK = 1.0
"""Seconds in which a GPU does nothing, before NVML tells how much others use it, and in which it then works."""
LANE = 0.123
"""GB/s of a lane of PCIe, to be doubled with each generation: 0.985 in the third, 3.94 in the fifth."""


def tell(**facts: Any) -> None:
    print(json.dumps(facts), file=_facts, flush=True)


def main() -> None:
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
        except Exception as error:  # noqa: BLE001 - as above
            tell(imports={name: _words(error)})
    tell(step="load DeepSpeed's operators")
    _operators()


def _devices(torch: Any) -> None:
    from accel_sft.launch.environment import device_count
    from accel_sft.launch.precision import computes_bf16

    tell(step="find the GPUs")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        count = device_count()
    if not count:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # as a launch does
    cuda = count if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(index) for index in range(cuda)]
    complaint = str(told[0].message).strip().partition("\n")[0] if told and not count else ""
    tell(device_count=count, device_names=names, cuda_complaint=complaint)
    tell(step="compute on each device")
    failures = {}
    for index in range(cuda):
        try:
            _product(torch, torch.float32, f"cuda:{index}", 64)
        except RuntimeError as error:
            failures[str(index)] = _words(error)
    tell(device_failures=failures)
    if failures or cuda != count:
        return
    tell(step="measure each GPU")
    for index in range(cuda):
        found: dict[str, float] = {}
        for measure in (_state, _copies):
            with contextlib.suppress(RuntimeError):  # its memory is full, which the check of GPUs tells
                found |= measure(torch, f"cuda:{index}")
        tell(gpus={str(index): found})
    tell(step="compare bf16 with float32")
    native = computes_bf16(torch.device("cuda:0" if cuda else "cpu"))[0]
    device, size = ("cuda:0", 4096) if cuda else ("cpu", 1024)
    seconds: dict[Any, list[float]] = {torch.float32: [], torch.bfloat16: []}
    for _ in range(1 + ROUNDS):  # the first round warms up
        for dtype, times in seconds.items():
            times.append(_product(torch, dtype, device, size))
    fastest = [min(times[1:]) for times in seconds.values()]
    tell(bf16_native=native, bf16_speedup=fastest[0] / fastest[1])


def _product(torch: Any, dtype: Any, device: str, size: int) -> float:
    """Seconds for the product of two square matrices."""
    matrix = torch.full((size, size), 0.5, dtype=dtype, device=device)
    return _seconds(torch, device, lambda: matrix @ matrix)


def _seconds(torch: Any, device: str, work: Callable[[], Any]) -> float:
    wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def _state(torch: Any, device: str) -> dict[str, float]:
    """What NVML says of a GPU at work: fields of `GpuState`, and what `condition` reads; what is unknown is missing."""
    import pynvml

    from accel_sft.launch.machine_state import gpu_state, open_gpu, others_gib, power_limits

    found: dict[str, float] = {}

    def ask(names: str, question: Callable[[], Iterable[float]]) -> None:
        with contextlib.suppress(pynvml.NVMLError):
            found.update(zip(names.split(), question(), strict=True))

    try:
        nvml, handle = open_gpu(str(torch.cuda.get_device_properties(device).uuid))
    except pynvml.NVMLError:
        return found
    time.sleep(LOOK)  # in this time, of which the use is told, nothing of this process may have run
    ask("busy_percent", lambda: [nvml.nvmlDeviceGetUtilizationRates(handle).gpu])
    until = time.monotonic() + LOOK
    while time.monotonic() < until:
        _product(torch, torch.float32, device, 4096)
    read = gpu_state(nvml, handle)._asdict() | {"others_gib": others_gib(nvml, handle)}
    found |= {name: value for name, value in read.items() if not math.isnan(value)}
    ask("celsius", lambda: [nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)])
    slow = nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    ask("slow_celsius", lambda: [nvml.nvmlDeviceGetTemperatureThreshold(handle, slow)])
    ask("watts usual_watts", lambda: power_limits(nvml, handle))
    now = nvml.nvmlDeviceGetCurrPcieLinkGeneration, nvml.nvmlDeviceGetCurrPcieLinkWidth
    could = nvml.nvmlDeviceGetMaxPcieLinkGeneration, nvml.nvmlDeviceGetMaxPcieLinkWidth
    ask("link", lambda: [LANE * 2 ** now[0](handle) * now[1](handle)])
    ask("full_link", lambda: [LANE * 2 ** could[0](handle) * could[1](handle)])
    return found


def _copies(torch: Any, device: str, kinds: Sequence[str] = ("pinned", "pageable")) -> dict[str, float]:
    """GB/s from host memory of each kind to the device, and back; loaders and offload use pinned memory."""
    found = {}
    there = torch.empty(COPIED, dtype=torch.uint8, device=device)
    for kind in kinds:
        here = torch.zeros(COPIED, dtype=torch.uint8, pin_memory=kind == "pinned")
        for way, to, source in (("from", there, here), ("to", here, there)):
            times = [_seconds(torch, device, functools.partial(to.copy_, source)) for _ in range(1 + ROUNDS)]
            found[f"{way} {kind}"] = COPIED / min(times[1:]) / 1e9  # the first warms up
    return found


def _operators() -> None:
    """Tell which operators are compiled in the folder that this user's launches use, and whether they can be loaded."""
    from torch.utils.cpp_extension import _import_module_from_library

    from accel_sft.launch.deepspeed_ops import OPERATORS, audit_locks, library

    for name in OPERATORS:
        state: dict[str, Any] = {"library": str(library(name)), "compiled": library(name).is_file(), "failure": ""}
        state["locks"] = [[finding.level, finding.what, finding.fix] for finding in audit_locks(name)]
        if state["compiled"]:
            try:
                _import_module_from_library(name, str(library(name).parent), True)
            except (ImportError, OSError) as error:
                state["failure"] = _words(error)
        tell(operators={name: state})


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


if __name__ == "__main__":
    _facts = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever the libraries print must not mix with the facts
    main()
    sys.stdout.flush()
