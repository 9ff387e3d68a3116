"""Chooses the precision of a launch that names none: bf16 if all ranks have instructions for it, else float32.

The choice depends on what devices and processors report, never on a measurement, so it repeats.
"""

import dataclasses
import platform
import re
from collections.abc import Mapping
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.launch import host_memory
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Names in /proc/cpuinfo of instructions that multiply bf16: Intel's, Intel's and AMD's, and ARM's. With AVX-512 alone
oneDNN accepts bf16 too, but emulates it, many times slower than float32."""


def cpu_flags() -> list[str]:
    """Return the names of this processor's bf16 instructions; [] if it has none or the system does not list them."""
    lines = (line.split() for line in _cpu_lines() if line.lower().startswith(("flags", "features")))
    given = next(lines, [])
    return [flag for flag in BF16_FLAGS if flag in given]


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is unknown."""
    named = (line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name"))
    return next(named, platform.machine())


def _cpu_lines() -> list[str]:
    file = host_memory.SYSTEM / "proc/cpuinfo"
    return file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else []


def computes_bf16(device: Any) -> tuple[bool, str]:
    """Whether a rank's device (a `torch.device`) has instructions for bf16, and why, in words."""
    if device.type == "cuda":
        import torch

        name, able = torch.cuda.get_device_name(device), torch.cuda.is_bf16_supported(including_emulation=False)
        return able, f"{name} computes it" if able else f"{name} has no bf16"
    if device.type == "cpu":
        flags = cpu_flags()
        return bool(flags), f"this CPU has {', '.join(flags)}" if flags else "this CPU has no instructions for bf16"
    return device.type != "mps", device.type


def precision_in_record(run: Mapping[str, Any]) -> str | None:
    """Return the precision in a run's record; None if the record (perhaps another program's) names none."""
    launch = run.get("launch")
    precision = launch.get("precision") if isinstance(launch, dict) else None
    return precision if precision in ("no", "bf16", "fp16") else None


def choose_precision(launch: Launch, device: Any, precision_of_run: str | None = None) -> Launch:
    """Return the launch with its precision, the same on all ranks; a collective. `precision_of_run` is the precision of
    the resumed or evaluated run; rank 0's value is used."""
    from accelerate.utils import gather_object

    named = launch.named_precision[0] if launch.named_precision else None
    ranks = gather_object([(named, precision_of_run, *computes_bf16(device))])
    if len(names := dict.fromkeys(name or "none" for name, *_ in ranks)) > 1:
        raise UserError(f"ranks have different precisions ({', '.join(names)}); use one launch file on all machines")
    if named:
        return launch
    precision_of_run = ranks[0][1]
    lack = next((why for *_, able, why in ranks if not able), "")
    if precision_of_run and not (precision_of_run == "fp16" and device.type == "cpu"):
        emulated = f"; {lack}, and emulates it slowly" if precision_of_run == "bf16" and lack else ""
        resolved = precision_of_run, f"the run's own{emulated}"
    elif PRECISION not in launch.environment:
        resolved = "no", "the default without accelerate launch"
    elif lack:
        resolved = "no", lack + ("; --mixed_precision fp16 is faster there" if device.type == "cuda" else "")
    else:
        resolved = "bf16", ranks[0][3]
    return dataclasses.replace(launch, resolved=resolved)


def assume_precision(launch: Launch, bf16: bool) -> Launch:
    """Return the launch with a precision. If it names none: bf16 if the devices compute it (`bf16`), else float32."""
    if launch.named_precision:
        return launch
    return dataclasses.replace(launch, resolved=("bf16" if bf16 else "no", "as its devices compute it"))


def type_in_files(model: Any, name: str, weights: Any, dtype: Any) -> Any:
    """The type with which the tensor `weights` is saved in files of type `dtype`. It is a different type where
    transformers keeps float32, for example for the biases with which a router chooses experts."""
    plan = model._get_dtype_plan(dtype)
    usual = dtype if weights.is_floating_point() else weights.dtype
    return next((kind for pattern, kind in plan.items() if re.search(pattern, name)), usual)
