"""`TorchFacts`: what torch and DeepSpeed can do here, found out in a process of its own."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from accel_sft.tools.doctor.processes import ask, import_path, script

LIBRARIES = ("torch", "accelerate", "transformers", "peft", "deepspeed")
"""Imported in this order. Without the last one, only launch files without DeepSpeed work."""
SECONDS = 300.0
"""Time for all of it; the libraries alone may take a minute from a slow disk."""


@dataclasses.dataclass
class TorchFacts:
    """Facts as `torch_script` tells them; those of a step that it did not reach have their defaults.

    Attributes:
        imports: by library, why it cannot be imported; empty if it can.
        device_count: accelerators that ranks can be spread over.
        device_failures: by index of a GPU, why it cannot compute.
        cuda_complaint: what torch says when it finds no GPU.
        bf16_speedup: seconds of a matrix product in float32 over those in bf16, measured; None if not measured.
        operators: by name of a DeepSpeed operator its `library`, whether it is `compiled`, the `failure` to load it,
            and findings about `locks`.
        fault: why the process did not come to its end; empty if it did.
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
    operators: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    fault: str = ""

    def failure(self, library: str) -> str:
        """Why a launch cannot use a library, in a few words; empty if it can."""
        if library in self.imports:
            return f"{library} cannot be imported" if self.imports[library] else ""
        return "torch and DeepSpeed could not be asked"


def find(seconds: float = SECONDS) -> TorchFacts:
    """Ask torch and DeepSpeed, in a process of their own, for at most this long."""
    answer = ask(script("torch_script"), seconds, import_path())
    facts, step = TorchFacts(), "start Python"
    for line in answer.out.splitlines():
        if not line.endswith("}"):  # it was killed within the line
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
