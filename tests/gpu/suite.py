"""The list of checks of tests/gpu, and what several of them need: references, comparisons, reasons for not trying."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launches import Failed, Machine, NotTried, Run, difference

TROUBLES = Path(__file__).with_name("troubles.py")
FLOAT32, BF16 = ("--mixed_precision", "no"), ("--mixed_precision", "bf16")


@dataclass(frozen=True)
class Check:
    """A claim, and what shows it: `run` returns what was measured, or raises Failed or NotTried.

    Attributes:
        value: what its answer is worth, from 1 to 20: how many users meet what it covers, what else covers it.
        seconds: how long it is expected to take on GPUs; an estimate.
        least: the fewest processes with which it says anything.
    """

    name: str
    claim: str
    value: int
    seconds: int
    least: int
    run: Callable[[Machine], str]

    def try_on(self, machine: Machine) -> tuple[str, str]:
        """Whether it holds ("yes", "NO" or "not tried"), and what was measured or why it was not tried."""
        machine.made.clear()
        if machine.processes < self.least:
            return "not tried", f"needs {self.least} GPUs, --gpus is {machine.processes}"
        try:
            return "yes", self.run(machine)
        except NotTried as reason:
            return "not tried", str(reason)
        except Failed as failure:
            return "NO", str(failure)
        except Exception as error:  # noqa: BLE001 - the other checks go on; what stopped this one is its result
            return "NO", f"{type(error).__name__}: {error}"


CHECKS: list[Check] = []


def check(name: str, claim: str = "", *, value: int, seconds: int, least: int = 1) -> Callable:
    """Register a check, whose docstring is its claim unless that is given; the list is in order of value per second."""

    def add(run: Callable[[Machine], str]) -> Callable[[Machine], str]:
        sentence = " ".join((claim or run.__doc__ or "").split()).removesuffix(".")
        CHECKS.append(Check(name, sentence, value, seconds, least, run))
        CHECKS.sort(key=lambda each: -each.value / each.seconds)
        return run

    return add


def hold(good: bool, measured: str) -> str:
    """What was measured; Failed with it unless it is good."""
    if not good:
        raise Failed(measured)
    return measured


def agree(reference: Run, others: Iterable[Run], within: float) -> str:
    """The differences, if all are small enough; Failed names the launches that failed and those that differ."""
    results, bad = [], []
    for run in others:
        try:
            apart = difference(run.expect(), reference)
        except Failed as failure:
            bad.append(str(failure))
        else:
            (results if apart <= within else bad).append(f"{run.folder.name} {apart:.1e}")
    hold(not bad, "; ".join(bad + results))
    return "largest relative difference of a loss: " + ", ".join(results)


def ddp_float32(machine: Machine) -> Run:
    """The curve with which launches are compared: ddp on one process, in float32."""
    return machine.once(
        "reference",
        lambda: machine.train("reference", "ddp", *machine.short(), launcher=FLOAT32, processes=1).expect(),
    )


def needs_gpu(machine: Machine) -> None:
    if not machine.devices:
        raise NotTried("needs a GPU")


def needs_module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise NotTried(f"{name} is not installed: put its wheel into the folder of WHEELS")


def needs_operators(machine: Machine, *operators: str) -> None:
    """Raise NotTried, with the audit's reason, if this machine cannot compile one of these operators of DeepSpeed."""
    from accel_sft.launch.deepspeed_ops import audit_compilers

    if reasons := [finding.what for finding in audit_compilers(list(operators), machine.devices)]:
        raise NotTried("; ".join(reasons))


def watched(machine: Machine, name: str, task: str) -> dict[str, Any]:
    """Arguments of the launch `name` whose ranks write about themselves what `seen` reads."""
    folder = machine.folder / f"{name}.watched"
    folder.mkdir(exist_ok=True)
    return {"task": f"{TROUBLES}:{task}", "environment": {"WATCHED": str(folder)}}


def seen(run: Run) -> dict[str, Any]:
    """What rank 0 of a watched run wrote about itself."""
    return json.loads((run.folder.with_name(f"{run.folder.name}.watched") / "rank-0.json").read_text())
