"""Finds out, in a separate process, what torch and DeepSpeed can do here."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from accel_sft.tools.doctor.processes import ask, import_path, script

LIBRARIES = ("torch", "accelerate", "transformers", "peft", "deepspeed")
"""Libraries in the order of their import. Without the last one, only launch files without DeepSpeed work."""
SECONDS = 300.0
"""Time limit of the whole process; importing the libraries may take a minute from a slow disk."""


@dataclasses.dataclass
class TorchFacts:
    """Facts that `torch_script` prints; facts of a step that it did not reach keep their defaults.

    Attributes:
        imports: why a library cannot be imported, by its name; "" if it can.
        device_count: number of accelerators that ranks can be spread over.
        device_failures: why a GPU cannot compute, by its index; a GPU that can is not listed.
        cuda_complaint: torch's warning if it finds no GPU.
        bf16_speedup: a matrix product's measured time in float32 divided by that in bf16; None if not measured.
        gpus: what `torch_script` measured of each GPU, by its index; what was not measured is missing.
        operators: by the name of a DeepSpeed operator its `library` file, whether that is `compiled`, the `failure` to
            load it ("" without one), and findings about its `locks`.
        fault: why the process failed; empty if it did not.
    """

    version: str = ""
    cuda: str | None = None
    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    device_count: int = 0
    device_names: list[str] = dataclasses.field(default_factory=list)
    device_failures: dict[str, str] = dataclasses.field(default_factory=dict)
    cuda_complaint: str = ""
    bf16_native: bool = True
    bf16_speedup: float | None = None
    gpus: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    operators: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def failure(self, library: str) -> str:
        """Why a launch cannot use a library, in a few words; empty if it can."""
        if library in self.imports:
            return f"{library} cannot be imported" if self.imports[library] else ""
        return "torch and DeepSpeed could not be asked"


def find(seconds: float = SECONDS) -> TorchFacts:
    """Run `torch_script` for at most `seconds` and return the facts that it printed."""
    answer = ask(script("torch_script"), seconds, import_path())
    facts, step = TorchFacts(), "start Python"
    for line in answer.out.splitlines():
        if not line.endswith("}"):  # the process was killed while it wrote the line
            continue
        told = json.loads(line)
        step = told.pop("step", step)
        for name, value in told.items():
            merged = {**getattr(facts, name), **value} if isinstance(value, dict) else value
            setattr(facts, name, merged)
    if answer.status is None:
        facts.fault = f"no answer within {seconds:.0f} s, in the step: {step}"
    elif answer.status:
        facts.fault = f"the process failed in the step: {step} ({answer.reason('it printed nothing')})"
    return facts
