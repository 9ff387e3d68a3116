"""What all checks share: facts about this machine, collected once, and functions that run checks and programs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.io.findings import Finding, warning
from accel_sft.io.terminal import waiting
from accel_sft.launch.info import Launch, launch_of_yaml
from accel_sft.launch.parallelism import fitted, sized

LEVELS = ("problem", "warning", "ok")
"""Levels of findings, the worst first. A problem means that training fails here, or that the check itself failed."""
ok, problem = (functools.partial(Finding, level) for level in ("ok", "problem"))
LIBRARIES = ("torch", "accelerate", "transformers", "peft", "deepspeed")
"""Libraries in the order of their import. Without the last one, launch files that use DeepSpeed do not work."""
FACTS_SECONDS = 300.0
"""Time limit for `torch_facts`; importing the libraries may take a minute from a slow disk."""
__all__ = ["Finding", "Machine", "ok", "problem", "warning"]


@dataclasses.dataclass
class Machine:
    """The user's options for the report, and the facts collected so far.

    Attributes:
        unusable: maps "devices", "ranks" or an operator's name to why it cannot be used here. Checks write it; the
            table of launch files reads it.
    """

    launch_files: Sequence[Path]
    runs: Path = Path("runs")
    unusable: dict[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def torch(self) -> TorchFacts:
        return torch_facts()

    @property
    def devices(self) -> int:
        """Number of accelerators that torch sees."""
        return self.torch.device_count

    def launch(self, file: Path) -> Launch:
        """The launch of a file here: one process per GPU of each machine; on CPUs, as many as the file sets."""
        return fitted(launch_of_yaml(file, *self.flags(file)), self.devices)

    def flags(self, file: Path) -> tuple[str, ...]:
        """The launcher's flag that starts one process for each GPU. Empty without GPUs, if the file needs no such flag,
        or if the file's groups of ranks do not fit here (the audit then names another file)."""
        own = fitted(launch_of_yaml(file), self.devices)
        wanted = self.devices * own.machines
        differs = wanted > own.world_size or (own.machines > 1 and wanted < own.world_size)
        return sized(own, wanted) if self.devices and differs else ()

    def findings(self, name: str, check: Callable[[Machine], Iterable[Finding]]) -> list[Finding]:
        """Run a check and return its findings. An exception becomes a finding too, so that the report goes on."""
        try:
            with waiting(f"checking {name}"):
                findings = list(check(self))
        except UserError as error:
            findings = [problem(line) for line in error.problems]  # the message already says how to fix it
        except Exception as error:  # noqa: BLE001 - whatever breaks one check, other checks are still reported
            what = f"the check failed: {type(error).__name__}: {error}"
            findings = [problem(what, "this error is unexpected; please report the line")]
        return [dataclasses.replace(finding, subject=name) for finding in findings]


@dataclasses.dataclass
class TorchFacts:
    """Facts that `torch_script` prints. If it ended early, the facts of later steps keep their defaults.

    Attributes:
        driver_cuda: the newest CUDA that the NVIDIA driver runs, as 1000 * major + 10 * minor.
        driver_gpus: maps the driver's index of a GPU to `name`, memory in bytes (`total`, `used`), and percentage of
            time in which it was `busy`; what the driver does not report is missing.
        imports: maps a library to why it cannot be imported; "" if it can.
        device_failures: maps torch's index of a GPU to why the GPU cannot compute.
        cuda_complaint: torch's warning if it sees no GPU.
        copies: maps torch's index of a GPU to GB/s in each direction of copying.
        operators: maps a DeepSpeed operator to its `library` file, whether this file exists (`compiled`), why it does
            not load (`failure`, "" if it does), and findings about its `locks`.
        fault: why the process failed; "" if it did not.
    """

    driver: str = ""
    driver_cuda: int = 0
    driver_failure: str = ""
    driver_gpus: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    version: str = ""
    cuda: str | None = None
    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    device_count: int = 0
    device_names: list[str] = dataclasses.field(default_factory=list)
    device_failures: dict[str, str] = dataclasses.field(default_factory=dict)
    cuda_complaint: str = ""
    bf16_native: bool = False
    bf16_why: str = ""
    copies: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    operators: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def failure(self, library: str) -> str:
        """Why a launch cannot use a library, in a few words; "" if it can."""
        if library in self.imports:
            return f"{library} cannot be imported" if self.imports[library] else ""
        return "torch and DeepSpeed could not be checked"


def torch_facts(seconds: float = FACTS_SECONDS) -> TorchFacts:
    """Run `torch_script` for at most `seconds` and return the facts that it printed."""
    answer = ask(script("facts"), seconds)
    facts, step = TorchFacts(), "start Python"
    for line in answer.out.splitlines():
        if not line.endswith("}"):  # the process was killed while it wrote the line
            continue
        printed = json.loads(line)
        step = printed.pop("step", step)
        for name, value in printed.items():
            merged = {**getattr(facts, name), **value} if isinstance(value, dict) else value
            setattr(facts, name, merged)
    if answer.status is None:
        facts.fault = f"no answer within {seconds:.0f} s, in the step: {step}"
    elif answer.status:
        facts.fault = f"the process failed in the step: {step} ({answer.reason('it printed nothing')})"
    return facts


class Answer(NamedTuple):
    """What a program printed, and its exit status: negative for a signal, None if the time limit ended the program."""

    out: str
    error: str
    status: int | None

    def reason(self, otherwise: str) -> str:
        """Why a program failed, in one line: the signal that ended it, the last line it printed, or `otherwise`."""
        if self.status is not None and self.status < 0:
            return f"ended by {signal.Signals(-self.status).name}"
        lines = [line.strip() for line in (self.error or self.out).splitlines() if line.strip()]
        return lines[-1] if lines else otherwise


def ask(command: Sequence[str], seconds: float) -> Answer:
    """Run a program to its end, or kill it and its children (such as torchrun's ranks) after the time limit."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **import_path()},
    ) as process:
        try:
            return Answer(*process.communicate(timeout=seconds), process.returncode)
        except BaseException as error:
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.kill()
            if isinstance(error, subprocess.TimeoutExpired):
                return Answer(*process.communicate(), None)
            raise


def script(*arguments: str, launcher: Sequence[str] = ()) -> list[str]:
    """The command that runs `torch_script` with this Python; `launcher` has the words that start ranks."""
    return [sys.executable, *launcher, "-m", "accel_sft.tools.doctor.torch_script", *arguments]


def import_path() -> dict[str, str]:
    """PYTHONPATH with which a process finds this package from any working directory."""
    root = str(Path(accel_sft.__file__).parents[1])
    return {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
