"""Checks whether DeepSpeed's operators are compiled, or can be compiled here; `--build` compiles them."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from accel_sft.launch.deepspeed_ops import OPERATORS, audit_compilers
from accel_sft.tools.doctor.check import Finding, ok, problem, warning
from accel_sft.tools.doctor.machine import Machine
from accel_sft.tools.doctor.processes import ask, import_path, script

SECONDS = 30.0
"""Time limit for a compiler to print its version."""


def compiler(machine: Machine) -> Iterator[Finding]:
    """Report which tools for compiling are here: C++ and ninja for operators, which `operators` reports; on GPUs C for
    `--compile`."""
    named = {"C++ compiler": os.environ.get("CXX", "c++"), "ninja": "ninja", "C compiler": os.environ.get("CC", "gcc")}
    found = []
    for name, program in named.items():
        if shutil.which(program):
            lines = ask([program, "--version"], SECONDS).out.splitlines()
            found.append(f"{name} {lines[0].strip()}" if lines and name == "ninja" else lines[0] if lines else program)
        else:
            found.append(f"no {name}")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        found.append("no headers of Python")
    yield ok(", ".join(found))


def operators(machine: Machine) -> Iterator[Finding]:
    """Report the state of each operator that a launch file needs here; with `--build`, compile missing ones first."""
    for name in OPERATORS:
        # launch files are read by accelerate, and so by torch, which may end or hang this process
        if name in machine.torch.operators and (users := machine.users(name)):
            yield from _operator(machine, name, users)


def _operator(machine: Machine, name: str, users: list[str]) -> Iterator[Finding]:
    state = machine.torch.operators.get(name)
    needed = f"{name} (for {', '.join(users)})"
    if state is None:  # torch or DeepSpeed cannot be imported, which is a finding of its own
        return
    built_now = machine.build and not state["compiled"]  # the build waits for another process's lock itself
    for kind, what, fix in state["locks"]:
        if kind != "warning":
            yield ok(what, fix)
        elif not built_now:
            yield warning(what, fix)
    obstacles = [*audit_compilers([name], machine.devices)]
    if state["failure"]:
        machine.unusable[name] = f"{name} cannot be loaded"
        fix = f"rm -r {Path(state['library']).parent}, then accel-sft doctor --build"
        yield problem(f"{needed} is compiled, and cannot be loaded: {state['failure']}", fix)
    elif obstacles:  # a launch is refused even with a compiled operator, since another torch would compile it anew
        for obstacle in obstacles:
            yield warning(f"{needed}: {lacking(obstacle)}", obstacle.fix)
    elif state["compiled"]:
        yield ok(f"{needed} is compiled")
    elif not machine.build:
        fix = "accel-sft doctor --build does it now, or else the first launch"
        yield ok(f"{needed} is not compiled yet ({OPERATORS[name]})", fix)
    else:
        yield _build(machine, name, needed, Path(state["library"]))


def lacking(obstacle: Finding) -> str:
    """What is missing, without the names of the operators, which the report has already named."""
    return obstacle.what.rpartition(" here, and ")[2]


def _build(machine: Machine, name: str, needed: str, library: Path) -> Finding:
    with machine.progress(f"DeepSpeed compiles {name}"):
        answer = ask(script("build_script", name), None, import_path())
    if answer.status == 0:
        machine.torch.operators[name]["compiled"] = True
        return ok(f"{needed} was compiled now")
    log = library.with_name("doctor.log")
    log.write_text(answer.out + answer.error, encoding="utf-8")
    errors = [line.strip() for line in answer.out.splitlines() + answer.error.splitlines() if "error:" in line]
    machine.unusable[name] = f"{name} cannot be compiled"
    return problem(
        f"{needed} could not be compiled: {errors[0] if errors else answer.reason('it does not say why')}",
        f"fix what {log} says, then accel-sft doctor --build",
    )
