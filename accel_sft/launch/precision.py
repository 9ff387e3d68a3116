"""Chooses the precision of a launch that names none: bf16 if all ranks have instructions for it, else float32.

The choice follows from what devices and processors report, never from a measurement, so that the same machine chooses
the same again.
"""

import dataclasses
import os
import platform
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of instructions that multiply bf16: of Intel, of Intel and AMD, of ARM. With AVX-512 alone
oneDNN accepts bf16 too, but emulates it, many times slower than float32."""
_CAPABILITY = 8
"""Major compute capability from which NVIDIA's GPUs compute bf16: Ampere."""


def cpu_flags() -> list[str]:
    """Return the names of this processor's bf16 instructions; [] if it has none or the system does not list them."""
    found = (line.split() for line in _cpu_lines() if line.lower().startswith(("flags", "features")))
    given = next(found, [])
    return [flag for flag in BF16_FLAGS if flag in given]


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is unknown."""
    named = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return next(named, platform.machine())


def _cpu_lines() -> list[str]:
    file = host_memory.SYSTEM / "proc/cpuinfo"
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


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
    """Return the precision that a run's record names; None if the record, perhaps a stranger's, names no known one."""
    launch = run.get("launch")
    found = launch.get("precision") if isinstance(launch, dict) else None
    return found if found in ("no", "bf16", "fp16") else None


class _Rank(NamedTuple):
    """What one rank tells the others: its device, its machine, and the precisions that its launch and record name."""

    computes_bf16: bool
    device: str
    kind: str
    host: str
    named: str | None
    began_with: str | None


def settled(launch: Launch, device: Any, began_with: str | None = None) -> Launch:
    """Return the launch with its precision, the same on all ranks. A collective: call it once there is a process group.

    Args:
        device: this rank's device.
        began_with: the precision of the run that is resumed or evaluated. Rank 0's value counts.
    Raises:
        UserError: on every rank, if the launches of different machines name different precisions.
    """
    from accelerate.utils import gather_object

    named = launch.named_precision[0] if launch.named_precision else None
    mine = _Rank(*computes_bf16(device), device.type, platform.node(), named, began_with)
    ranks = [_Rank(*rank) for rank in gather_object([mine])]
    if len({rank.named for rank in ranks}) > 1:
        told = ", ".join(dict.fromkeys(f"{rank.named or 'none'} on {rank.host}" for rank in ranks))
        raise UserError(f"the ranks' launches name different precisions: {told}; give all machines the same launch")
    if named:
        return launch
    lacking = next((rank for rank in ranks if not rank.computes_bf16), None)
    began_with = ranks[0].began_with
    if began_with and not (began_with == "fp16" and device.type == "cpu"):
        emulated = f"; {_lack(lacking, ranks)}, and emulates it slowly" if began_with == "bf16" and lacking else ""
        return dataclasses.replace(launch, resolved=(began_with, f"the run's own{emulated}"))
    if PRECISION not in launch.environment:
        return dataclasses.replace(launch, resolved=("no", "the default without accelerate launch"))
    if lacking is None:
        why = mine.device if device.type == "cpu" else f"{mine.device} computes it"
        return dataclasses.replace(launch, resolved=("bf16", why))
    faster = "; --mixed_precision fp16 is faster there" if lacking.kind == "cuda" else ""
    return dataclasses.replace(launch, resolved=("no", _lack(lacking, ranks) + faster))


def _lack(rank: _Rank, ranks: list[_Rank]) -> str:
    """Say that a rank's device does not compute bf16; name its machine if another rank's device does."""
    what = rank.device if rank.kind == "cpu" else f"{rank.device} has no bf16"
    return f"{rank.host}: {what}" if any(other.computes_bf16 for other in ranks) else what


def expected(launch: Launch, bf16: bool) -> Launch:
    """Return the launch with the precision that it would choose on devices with (`bf16`) or without bf16."""
    if launch.named_precision:
        return launch
    return dataclasses.replace(launch, resolved=("bf16" if bf16 else "no", "as its devices compute it"))


def this_machine_computes_bf16(*, with_gpus: bool = True) -> bool:
    """Whether ranks started here would have bf16 instructions: of NVIDIA's GPUs, as the driver says, else of the CPU.

    Imports no torch.
    """
    import pynvml

    if with_gpus and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1"):
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


def type_in_files(model: Any, name: str, weights: Any, dtype: Any) -> Any:
    """The type of these weights (a tensor) in files of type `dtype`: another where transformers keeps float32, such as
    for the biases by which experts are chosen."""
    kept = model._get_dtype_plan(dtype)
    usual = dtype if weights.is_floating_point() else weights.dtype
    return next((kind for pattern, kind in kept.items() if re.search(pattern, name)), usual)
