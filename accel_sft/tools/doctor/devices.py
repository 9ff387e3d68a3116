"""Checks the GPUs: the driver, which GPUs torch sees, whether they are in use, and whether bf16 is fast."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from accel_sft.launch.audit import NVIDIA
from accel_sft.launch.precision import cpu_flags, cpu_name
from accel_sft.tools.doctor.check import Finding, ok, problem, warning
from accel_sft.tools.doctor.driver import SECONDS, Driver
from accel_sft.tools.doctor.machine import Machine
from accel_sft.tools.doctor.processes import ask

USED = 0.1
"""Share of a GPU's memory that may be in use already without a warning."""
SLOW, FAST = 0.95, 1.5
"""Speeds of bf16, as multiples of float32's, below which there is a warning (SLOW) or only a remark (FAST)."""


def gpus(machine: Machine) -> Iterator[Finding]:
    """Report the GPUs that the driver and torch find, those already in use, and those that cannot compute."""
    found, facts = machine.driver, machine.torch
    if found is None and NVIDIA.exists():
        yield warning("nvidia-smi is not on PATH, so the driver was not checked", "install it, or add its folder")
    if found and found.failure:
        fix = "restart the machine: the driver's module and its library differ" if "mismatch" in found.failure else ""
        yield problem(found.failure, fix or "install the NVIDIA driver again, and restart the machine")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if found and found.gpus:
        kinds = dict.fromkeys((name, total) for name, total, _ in found.gpus)
        counted = [f"{sum(gpu[:2] == kind for gpu in found.gpus)} x {_with_memory(*kind)}" for kind in kinds]
        seen = f", of which torch sees {machine.devices}" if 0 < machine.devices != len(found.gpus) else ""
        yield ok(f"{', '.join(counted)}{seen}; driver {found.version}")
        yield from _in_use(found)
    elif machine.devices:
        names = facts.device_names or ["an accelerator"]
        yield ok(f"{machine.devices} x {', '.join(dict.fromkeys(names))}")
    elif not found:
        yield ok("none; training runs on the CPU")
    if found and not machine.devices and hidden in ("", "-1"):
        yield ok("hidden from torch by CUDA_VISIBLE_DEVICES: training runs on the CPU")
    for index, failure in facts.device_failures.items():
        fix = "update the driver, or install a build of torch for this kind of GPU; CUDA_VISIBLE_DEVICES leaves it out"
        yield problem(f"GPU {index} cannot compute: {failure}", fix)
        machine.unusable.setdefault("devices", f"GPU {index} cannot compute")


def _with_memory(name: str, mib: float) -> str:
    return f"{name} ({mib / 1024:.0f} GiB)" if mib else name


def _in_use(found: Driver) -> Iterator[Finding]:
    for index, (_, total, used) in enumerate(found.gpus):
        if used > USED * total:
            what = f"GPU {index}: {used / 1024:.1f} of {total / 1024:.1f} GiB are in use already"
            yield warning(what, "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses others")


def cuda(machine: Machine) -> Iterator[Finding]:
    """Compares the driver's CUDA version with torch's: a driver runs its own major version and all older ones."""
    found, facts = machine.driver, machine.torch
    if not (found and found.gpus) or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or not facts.version:
        return
    if facts.cuda is None:
        if not machine.devices:
            what = f"torch {facts.version} is a build without CUDA: it uses none of the GPUs"
            yield problem(what, "install the CUDA build: bash setup.sh in the checkout, or see pytorch.org")
        return
    words = f"torch {facts.version} for CUDA {facts.cuda}, the driver runs up to {found.cuda or 'an unknown one'}"
    if found.cuda and int(found.cuda.split(".")[0]) < int(facts.cuda.split(".")[0]):
        fix = "update the driver, or install torch for the driver's CUDA: bash setup.sh in the checkout"
        yield problem(words, fix)
    elif not machine.devices:
        complaint = facts.cuda_complaint or facts.fault or "it does not say why"
        yield problem(f"torch sees no GPU: {complaint}", "update the driver, and restart the machine")
    else:
        yield ok(words)
    if machine.devices and (nvcc := _nvcc()) and nvcc.split(".")[0] != facts.cuda.split(".")[0]:
        what = f"nvcc is of CUDA {nvcc}, torch of {facts.cuda}: what is compiled for GPUs may fail"
        yield warning(what, f"install the toolkit of CUDA {facts.cuda} and set CUDA_HOME; only z3_nvme needs it")


def _nvcc() -> str:
    """The version of the CUDA toolkit's compiler; empty if there is none (the check of operators reports that)."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    program = Path(home, "bin", "nvcc")
    named = str(program) if program.is_file() else shutil.which("nvcc")
    release = re.search(r"release ([\d.]+)", ask([named, "--version"], SECONDS).out) if named else None
    return release[1] if release else ""


def bf16(machine: Machine) -> Iterator[Finding]:
    """Report whether launch files that name no precision compute in bf16 here, and the measured speed of bf16."""
    facts = machine.torch
    if facts.bf16_speedup is None:
        return
    where = facts.device_names[0] if facts.device_names else _cpu()
    ratio, slower = facts.bf16_speedup, "--mixed_precision no in front of -m"
    measured = f"{ratio:.1f} times as fast as float32" if ratio >= 1 else f"{1 / ratio:.1f} times slower than float32"
    words = f"{measured} (one product of matrices, measured; {where})"
    if not facts.bf16_native:
        instead = "launch files that name no precision compute in float32"
        if facts.device_names:
            yield warning(f"{where} has no bf16: {instead}", "--mixed_precision fp16 in front of -m is faster")
        else:
            yield ok(f"{instead}; bf16 would be emulated, {words}")
    elif ratio < SLOW:
        yield warning(words, f"it saves memory, not time; for speed: {slower}")
    else:
        yield ok(words if ratio >= FAST else f"{words}: it saves memory, hardly time")


def _cpu() -> str:
    """The CPU's name with its instructions for bf16."""
    return f"{cpu_name()} with {', '.join(cpu_flags()) or 'no instructions for bf16'}"
