"""Checks what is installed: versions against their bounds, imports and tasks; with --network also the hub."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator

import accel_sft
from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.tools.doctor.machine import LIBRARIES, Finding, Machine, ask, ok, problem, script, warning

DISTRIBUTION = "accel-sft"
NETWORK_SECONDS = 15.0
"""Time limit for the hub's answer."""


def versions(machine: Machine) -> Iterator[Finding]:
    """Compare installed versions with the bounds in this package's metadata."""
    from packaging.requirements import Requirement

    try:
        required = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        what = "accel-sft is not installed, only imported: the versions of its libraries were not checked"
        yield warning(what, "bash setup.sh in the checkout installs all")
        return
    fitting = {}
    for requirement in map(Requirement, required):
        name, fix = requirement.name, f'pip install "{requirement}"'
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(f"{name} is not installed", fix)
            continue
        broken = [bound for bound in requirement.specifier if not bound.contains(version, prereleases=True)]
        if not broken:
            fitting[name] = version
        elif all(bound.operator in ("<", "<=") for bound in broken):
            yield warning(f"{name} {version} is newer than what accel_sft was tested with ({broken[0]})", fix)
        else:
            what = f"{name} {version}: accel_sft {accel_sft.__version__} needs {requirement.specifier}"
            yield problem(what, fix)
    if fitting:
        named = ", ".join(f"{name} {fitting[name]}" for name in LIBRARIES if name in fitting)
        yield ok(f"{len(fitting)} libraries within the bounds: {named}")


def imports(machine: Machine) -> Iterator[Finding]:
    """Report whether the libraries can be imported: even an installed one may lack a system library, or crash."""
    facts = machine.torch
    libraries = LIBRARIES[:-1] if sys.platform == "darwin" else LIBRARIES  # on macOS DeepSpeed is not installed
    for name in libraries:
        if failure := facts.imports.get(name):
            fix = f'{sys.executable} -c "import {name}" shows all of it; then install it again'
            yield problem(f"{name} cannot be imported: {failure}", fix)
    if facts.fault:
        fix = "the same step in a Python of your own shows more: the driver, or a build for another CPU or system"
        yield problem(f"torch and DeepSpeed could not be asked: {facts.fault}", fix)
    elif not any(map(facts.failure, libraries)):
        yield ok(f"{', '.join(libraries)} can be imported")


def tasks(machine: Machine) -> Iterator[Finding]:
    usable = []
    for plugin in registry.plugins():
        try:
            registry.load_plugin(plugin)
            usable.append(plugin.name)
        except UserError as error:
            for line in error.problems:
                yield warning(line, "fix or uninstall its package; other tasks run")
    if usable:
        yield ok(", ".join(usable))
    else:
        yield problem("no task can be used", "accel-sft tasks says why; accel-sft new-task NAME writes one")


def hub(machine: Machine) -> Iterator[Finding]:
    """Report whether models can be downloaded; only with --network, since the request leaves this machine."""
    if not machine.network:
        return
    answer = ask(script("hub"), NETWORK_SECONDS)
    if answer.status == 0:
        yield ok("the hub answers")
        return
    why = f"no answer within {NETWORK_SECONDS:.0f} s" if answer.status is None else answer.reason("no reason given")
    fix = "see HTTPS_PROXY and HF_ENDPOINT; --model takes a folder, and tiny downloads nothing"
    yield warning(f"the hub cannot be reached: {why}", fix)
