"""Checks the GPUs: the driver, which of them torch sees, who uses them, copies from the host, and bf16."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from accel_sft.launch.precision import cpu_flags, cpu_name
from accel_sft.tools.doctor.machine import Finding, Machine, ask, ok, problem, warning
from accel_sft.tracking.disturbed import LOST

USED = 0.1
"""Share of a GPU's memory that may be in use already without a warning."""
SLOW, FAST = 0.95, 1.5
"""Speeds of bf16, as multiples of float32's, below which there is a warning (SLOW) or only a remark (FAST)."""
_SLOW_LINK = 0.5
"""Share of what its link could carry below which copies from pinned memory are slow; 0.8 to 0.9 is usual."""
_GIB = 2**30


def gpus(machine: Machine) -> Iterator[Finding]:
    """Report the GPUs that the driver and torch see, those already in use, and those that cannot compute."""
    facts = machine.torch
    if facts.driver_failure:
        fix = "install the NVIDIA driver again, and restart the machine"
        if "mismatch" in facts.driver_failure.lower():
            fix = "restart the machine: the driver's module and its library differ"
        level = warning if machine.devices else problem
        yield level(f"the NVIDIA driver does not answer: {facts.driver_failure}", fix)
    rows = facts.driver_gpus.values()
    if rows:
        names = (f"{row['name']}{_memory(row)}" for row in rows)
        kinds = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
        seen = f", of which torch sees {machine.devices}" if 0 < machine.devices != len(rows) else ""
        yield ok(f"{kinds}{seen}; driver {facts.driver}")
    elif machine.devices:
        kinds = ", ".join(dict.fromkeys(facts.device_names or ["an accelerator"]))
        yield ok(f"{machine.devices} x {kinds}")
    elif not facts.driver_failure:
        yield ok("none; training runs on the CPU")
    for index, row in facts.driver_gpus.items():
        used, busy = row.get("used", 0), row.get("busy", 0)
        if used > USED * row.get("total", math.inf) or busy >= 100 * LOST:
            what = f"GPU {index} is in use: {busy}% of the time, {used / _GIB:.1f} GiB"
            yield warning(what, "nvidia-smi shows by whom; CUDA_VISIBLE_DEVICES chooses others")
    if rows and not machine.devices and _hidden():
        yield ok("hidden from torch by CUDA_VISIBLE_DEVICES: training runs on the CPU")
    for index, failure in facts.device_failures.items():
        fix = "update the driver, or install a build of torch for this kind of GPU; CUDA_VISIBLE_DEVICES leaves it out"
        yield problem(f"GPU {index} cannot compute: {failure}", fix)
        machine.unusable.setdefault("devices", f"GPU {index} cannot compute")


def _memory(row: dict[str, float]) -> str:
    return f" ({row['total'] / _GIB:.0f} GiB)" if "total" in row else ""


def _hidden() -> bool:
    return os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def copies(machine: Machine) -> Iterator[Finding]:
    """Report each GPU's bandwidth to the host's memory, on which loading and offload depend."""
    for index, speeds in machine.torch.copies.items():
        ways = {way: speed for way, speed in speeds.items() if way != "link"}
        words = ", ".join(f"{speed:.3g} GB/s {way} memory" for way, speed in ways.items())
        yield ok(f"GPU {index}: {words or 'not measured'}")
        slowest = min((speed for way, speed in ways.items() if "pinned" in way), default=math.inf)
        if slowest < _SLOW_LINK * speeds.get("link", 0.0):
            what = f"GPU {index} copies {slowest:.1f} GB/s of {speeds['link']:.0f} that its link could carry"
            fix = (
                "look for other work on host memory, and at slot and BIOS; numactl keeps a process to the GPU's socket"
            )
            yield warning(what, fix)


def cuda(machine: Machine) -> Iterator[Finding]:
    """Compare the driver's CUDA version with torch's: a driver runs its own major version and all older ones."""
    facts = machine.torch
    if not facts.driver_gpus or _hidden() or not facts.version:
        return
    if facts.cuda is None:
        if not machine.devices:
            what = f"torch {facts.version} is a build without CUDA: it uses none of the GPUs"
            yield problem(what, "install the CUDA build: bash setup.sh in the checkout, or see pytorch.org")
        return
    major, minor = facts.driver_cuda // 1000, facts.driver_cuda % 1000 // 10
    words = f"torch {facts.version} for CUDA {facts.cuda}, the driver runs up to {major}.{minor}"
    if 0 < major < int(facts.cuda.split(".")[0]):
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
    program = shutil.which(Path(home, "bin", "nvcc")) or shutil.which("nvcc")
    release = re.search(r"release ([\d.]+)", ask([program, "--version"], 30).out) if program else None
    return release[1] if release else ""


def bf16(machine: Machine) -> Iterator[Finding]:
    """Report whether launch files that name no precision compute in bf16 here, and the measured speed of bf16."""
    facts = machine.torch
    if facts.bf16_speedup is None:
        return
    cpu = f"{cpu_name()} with {', '.join(cpu_flags()) or 'no instructions for bf16'}"
    where = facts.device_names[0] if facts.device_names else cpu
    ratio = facts.bf16_speedup
    measured = f"{ratio:.1f} times as fast as float32" if ratio >= 1 else f"{1 / ratio:.1f} times slower than float32"
    words = f"{measured} (one product of matrices, measured; {where})"
    if not facts.bf16_native:
        instead = "launch files that name no precision compute in float32"
        if facts.device_names:
            yield warning(f"{where} has no bf16: {instead}", "--mixed_precision fp16 in front of -m is faster")
        else:
            yield ok(f"{instead}; bf16 would be emulated, {words}")
    elif ratio < SLOW:
        yield warning(words, "it saves memory, not time; for speed: --mixed_precision no in front of -m")
    else:
        yield ok(words if ratio >= FAST else f"{words}: it saves memory, hardly time")
