"""The precision of a launch that names none: bf16 where all ranks have instructions for it, float32 elsewhere.

Decided by what devices and processors say of themselves, never by a measurement, so that the same machine decides the
same again.
"""

import dataclasses
import os
import platform
from collections.abc import Mapping
from typing import Any

from accel_sft.launch import host_memory
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of instructions that multiply bf16: Intel's, Intel's and AMD's, ARM's. oneDNN takes AVX-512
alone for enough, with which bf16 is emulated, many times slower than float32."""
_CAPABILITY = 8
"""Major compute capability from which NVIDIA's GPUs compute bf16: Ampere."""


def cpu_flags() -> list[str]:
    """This processor's instructions for bf16, by name; none where the system does not tell."""
    file = host_memory.SYSTEM / "proc/cpuinfo"
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []
    given = next((line.split() for line in lines if line.lower().startswith(("flags", "features"))), [])
    return [flag for flag in BF16_FLAGS if flag in given]


def computes_bf16(device: Any) -> tuple[bool, str]:
    """Whether a rank's device (a `torch.device`) has instructions for bf16, and the device in words."""
    if device.type == "cuda":
        import torch

        return torch.cuda.is_bf16_supported(including_emulation=False), torch.cuda.get_device_name(device)
    if device.type == "cpu":
        flags = cpu_flags()
        return bool(flags), f"this CPU has {', '.join(flags)}" if flags else "this CPU has no instructions for bf16"
    return device.type != "mps", device.type


def recorded(run: Mapping[str, Any]) -> str | None:
    """The precision that a run's record names, which may be a stranger's; None where it names none."""
    launch = run.get("launch")
    found = launch.get("precision") if isinstance(launch, dict) else None
    return found if found in ("no", "bf16", "fp16") else None


def settled(launch: Launch, device: Any, began_with: str | None = None) -> Launch:
    """The launch with its precision, the same on all ranks, which call this together once they form a group.

    Args:
        device: this rank's.
        began_with: the precision of the run that is resumed or evaluated. Rank 0's counts.
    """
    from accelerate.utils import gather_object

    if launch.named_precision:
        return launch
    native, words = computes_bf16(device)
    ranks = gather_object([(native, words, device.type, platform.node(), began_with)])
    lacking = next((rank for rank in ranks if not rank[0]), None)
    began_with = ranks[0][-1]
    if began_with and not (began_with == "fp16" and device.type == "cpu"):
        emulated = f"; {_lack(lacking, ranks)}, and emulates it slowly" if began_with == "bf16" and lacking else ""
        return dataclasses.replace(launch, resolved=(began_with, f"the run's own{emulated}"))
    if PRECISION not in launch.environment:
        return dataclasses.replace(launch, resolved=("no", "the default without accelerate launch"))
    if lacking is None:
        return dataclasses.replace(launch, resolved=("bf16", words if device.type == "cpu" else f"{words} computes it"))
    faster = "; --mixed_precision fp16 is faster there" if lacking[2] == "cuda" else ""
    return dataclasses.replace(launch, resolved=("no", _lack(lacking, ranks) + faster))


def _lack(rank: tuple[Any, ...], ranks: list[tuple[Any, ...]]) -> str:
    """In words, what a rank's device lacks, with the machine's name where others have it."""
    what = rank[1] if rank[2] == "cpu" else f"{rank[1]} has no bf16"
    return f"{rank[3]}: {what}" if any(other[0] for other in ranks) else what


def expected(launch: Launch, bf16: bool) -> Launch:
    """The launch as it would compute on devices with or without instructions for bf16, without starting it."""
    if launch.named_precision:
        return launch
    return dataclasses.replace(launch, resolved=("bf16" if bf16 else "no", "as its devices compute it"))


def this_machine_computes_bf16() -> bool:
    """Whether ranks started here would: on NVIDIA's GPUs as the driver tells, else on the CPU. Imports no torch."""
    import pynvml

    if os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return bool(cpu_flags())
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            if handles:
                return all(pynvml.nvmlDeviceGetCudaComputeCapability(handle)[0] >= _CAPABILITY for handle in handles)
        finally:
            pynvml.nvmlShutdown()
    return bool(cpu_flags())
