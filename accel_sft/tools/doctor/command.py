"""`accel-sft doctor`: says what this machine can run, what it lacks, how to fix this, and which launch files work."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.io.findings import Finding, counted, lines, styled, worst
from accel_sft.io.terminal import quiet
from accel_sft.launch.info import shipped
from accel_sft.launch.launcher import under_launcher

if TYPE_CHECKING:
    from accel_sft.tools.doctor.machine import Machine

    Checks = dict[str, dict[str, Callable[[Machine], Iterable[Finding]]]]

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "yes": "green", "no": "red"}


def checks() -> Checks:
    """All checks by heading and name, in order. The first sets a launch's environment variables for later checks."""
    from accel_sft.tools.doctor import host, launches

    return {
        "Machine": {
            "variables": host.environment,
            "cores": host.cores,
            "memory": host.memory,
            "disk": host.disk,
        },
        "Software": {"versions": host.versions, "imports": host.imports},
        "Device": {"GPU": host.gpus, "copies": host.copies, "CUDA": host.cuda, "bf16": host.bf16},
        "DeepSpeed": {"operators": launches.operators},
        "Ranks": {"/dev/shm": host.shared_memory, "exchange": launches.exchange},
    }


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[LAUNCH_FILE]...")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder for runs, which must be writable and have free space.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, after all checks.")
def doctor(files: tuple[Path, ...], output_dir: Path, as_json: bool) -> None:
    """Say what this machine can run, and which launch files work here: the shipped ones and any LAUNCH_FILE.

    The exit status is 1 if there is a problem. Warnings do not count, nor do launch files for other machines.
    """
    from accel_sft.tools.doctor.launches import launch_file
    from accel_sft.tools.doctor.machine import LEVELS, Machine

    if under_launcher():
        raise UserError("accel-sft doctor starts its own ranks: start it without accelerate launch")
    machine = Machine([*shipped().values(), *files], output_dir)
    findings: list[Finding] = []
    with quiet(None, shown_on=2) if as_json else contextlib.nullcontext():
        if not as_json:
            system = f"{platform.node()}, {platform.system()} {platform.machine()}"
            click.echo(styled(f"accel_sft {accel_sft.__version__} on {system}", bold=True))
        for heading, named in checks().items():
            made = (machine.findings(name, check) for name, check in named.items())
            findings += _printed(heading, made, as_json)
        working = _printed("Launch files", ([launch_file(machine, file)] for file in machine.launch_files), as_json)
    level = worst(findings, LEVELS)
    if as_json:
        parts = {"findings": findings, "launch_files": working}
        report = {name: [finding.as_dict() for finding in part] for name, part in parts.items()}
        head = {"version": accel_sft.__version__, "level": level}
        click.echo(json.dumps(head | report, indent=2, ensure_ascii=False))
    else:
        _print_end(machine, findings, [finding.subject for finding in working if finding.level == "yes"])
    sys.exit(level == "problem")


def _printed(heading: str, made: Iterable[list[Finding]], as_json: bool) -> list[Finding]:
    """Return the findings of some checks; unless the report is JSON, print each finding as soon as it is made."""
    findings: list[Finding] = []
    for new in made:
        if new and not findings and not as_json:
            click.echo(styled(f"\n{heading}", bold=True))
        findings += new
        for finding in () if as_json else new:
            for line in lines(finding, _COLORS, indent=2):
                click.echo(line)
    return findings


def _print_end(machine: Machine, findings: list[Finding], working: list[str]) -> None:
    levels = [finding.level for finding in findings]
    where = counted(machine.devices, "GPU") if machine.devices else "the CPU"
    counts = ", ".join(counted(levels.count(level), level) for level in ("problem", "warning"))
    click.echo(f"\n{len(working)} of {len(machine.launch_files)} launch files work here, on {where}; {counts}.")
    if working:
        name = "ddp" if "ddp" in working else working[0]
        file = next(file for file in machine.launch_files if file.stem == name)
        command = ["accelerate", "launch", "--config_file", f"{name}.yaml", *machine.flags(file), "-m accel_sft math"]
        click.echo("To train the example task math with one of them:")
        click.echo(f"  accel-sft launch-file {name} > {name}.yaml\n  {' '.join(command)}")
