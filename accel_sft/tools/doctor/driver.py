"""Asks nvidia-smi about this machine's GPUs and driver, without torch."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass

from accel_sft.tools.doctor.processes import ask

SECONDS = 30.0
"""Time limit of one call of nvidia-smi, which hangs if the driver does."""
_QUERY = "name,driver_version,memory.total,memory.used"


@dataclass(frozen=True)
class Driver:
    """What nvidia-smi reports.

    Attributes:
        gpus: each GPU's name, memory in MiB and memory in use in MiB.
        version: the driver's version.
        cuda: the newest CUDA that the driver runs, such as "12.4"; empty if nvidia-smi does not say.
        failure: why nvidia-smi gave no answer; empty if it gave one.
    """

    gpus: tuple[tuple[str, float, float], ...] = ()
    version: str = ""
    cuda: str = ""
    failure: str = ""


def ask_driver() -> Driver | None:
    """What nvidia-smi reports; None on a machine without it."""
    if not (program := shutil.which("nvidia-smi")):
        return None
    answer = ask([program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"], SECONDS)
    if answer.status is None:
        return Driver(failure=f"nvidia-smi gave no answer within {SECONDS:.0f} s")
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.out.splitlines()]
    rows = [row for row in rows if len(row) == 4]
    if answer.status or not rows:
        first = (answer.out + answer.error).strip().splitlines()
        return Driver(failure=f"nvidia-smi fails: {first[0] if first else f'status {answer.status}'}")
    cuda = re.search(r"CUDA Version:\s*([\d.]+)", ask([program], SECONDS).out)
    gpus = tuple((name, _mib(total), _mib(used)) for name, _, total, used in rows)
    return Driver(gpus, rows[0][1], cuda[1] if cuda else "")


def _mib(text: str) -> float:
    """Return a number that nvidia-smi printed; 0 if it printed none, since the GPU does not report one."""
    return float(text) if re.fullmatch(r"[\d.]+", text) else 0.0
