"""`accel-sft doctor`: what this machine can run, what it lacks and how to fix it, and which launch files work."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.io import terminal
from accel_sft.io.text import one_line
from accel_sft.launch.audit_findings import Finding
from accel_sft.launch.info import shipped
from accel_sft.launch.launcher import under_launcher

if TYPE_CHECKING:
    from accel_sft.tools.doctor.launch_table import LaunchRow

_COLORS = {"ok": "green", "warning": "yellow", "problem": "red", "yes": "green", "no": "red"}
_NAME, _LEVEL = 12, 8
"""Widths in terminal cells of the columns before a finding: the check's name and the finding's level."""


@click.command()
@click.argument("files", nargs=-1, type=click.Path(path_type=Path), metavar="[LAUNCH_FILE]...")
@click.option("--build", is_flag=True, help="Compile DeepSpeed's missing operators; takes minutes.")
@click.option("--network", is_flag=True, help="Also ask whether the Hugging Face Hub can be reached.")
@click.option(
    "--output-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="The folder for runs, which must be writable and have free space.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON, after all checks.")
def doctor(files: tuple[Path, ...], build: bool, network: bool, output_dir: Path, as_json: bool) -> None:
    """Say what this machine can run, and which launch files work here: the shipped ones and any LAUNCH_FILE.

    The exit status is 1 if there is a problem. Warnings do not count, nor do launch files for other machines.
    """
    from accel_sft.tools.doctor import launch_table
    from accel_sft.tools.doctor.check import worst
    from accel_sft.tools.doctor.checks import CHECKS
    from accel_sft.tools.doctor.machine import Machine

    if under_launcher():
        raise UserError("accel-sft doctor starts its own ranks: start it without accelerate launch")
    machine = Machine([*shipped().values(), *files], output_dir, build, network)
    machine.progress = functools.partial(_progress, sys.stderr if as_json else sys.stdout)
    printed = (lambda *_: None) if as_json else click.echo
    printed(_bold(f"accel_sft {accel_sft.__version__} on {platform.node()}, {platform.system()} {platform.machine()}"))
    found: list[dict[str, str]] = []
    subject = ""
    for check in CHECKS:
        findings = check.run(machine)
        if findings and check.subject != subject:
            subject = check.subject
            printed(f"\n{_bold(subject)}")
        for finding in findings:
            found.append({"subject": check.subject, "check": check.name, **_as_dict(finding)})
            printed(_line(check.name, finding))
    rows = [launch_table.row(machine, file) for file in machine.launch_files]
    level = worst(Finding(each["level"], "", "") for each in found)
    if as_json:
        report = {"version": accel_sft.__version__, "level": level, "findings": found}
        click.echo(json.dumps(report | {"launch_files": [vars(row) for row in rows]}, indent=2, ensure_ascii=False))
    else:
        _print_table(rows, found, machine.devices)
    sys.exit(level == "problem")


def _as_dict(finding: Finding) -> dict[str, str]:
    return {"level": finding.level, "what": one_line(finding.what, 1000), "fix": one_line(finding.fix, 1000)}


def _line(name: str, finding: Finding) -> str:
    margin = 2 + _LEVEL + _NAME
    level = _styled(f"{finding.level:<{_LEVEL}}", fg=_COLORS[finding.level], bold=finding.level == "problem")
    words = one_line(finding.what, 1000)
    lines = [terminal.wrapped(" " * margin + words, margin)]
    if finding.fix:
        lines.append(terminal.wrapped(" " * margin + f"-> {one_line(finding.fix, 1000)}", margin + 3))
    return f"  {level}{name:<{_NAME}}" + "\n".join(lines)[margin:]


def _print_table(rows: list[LaunchRow], found: list[dict[str, str]], devices: int) -> None:
    click.echo(f"\n{_bold('Launch files')}")
    width = 2 + max(len(row.file) for row in rows)
    for row in rows:
        word = "yes" if row.works else "no"
        words = "; ".join(filter(None, (f"with {row.flags}" if row.flags else "", row.why)))
        indent = 2 + width + 5
        line = terminal.wrapped(" " * indent + words, indent)[indent:]
        click.echo(
            f"  {row.file:<{width}}{_styled(word, fg=_COLORS[word])}{' ' * (5 - len(word)) + line if line else ''}"
        )
    levels = [each["level"] for each in found]
    where = f"{devices} GPU{'s' * (devices > 1)}" if devices else "the CPU"
    working = [row for row in rows if row.works]
    counts = [_counted(levels.count("problem"), "problem"), _counted(levels.count("warning"), "warning")]
    click.echo(f"\n{len(working)} of {len(rows)} launch files work here, on {where}; {', '.join(counts)}.")
    if working:
        best = next((row for row in working if row.file == "ddp"), working[0])
        flags = f" {best.flags}" if best.flags else ""
        click.echo("To train the example task math with one of them:")
        click.echo(f"  accel-sft launch-file {best.file} > {best.file}.yaml")
        click.echo(f"  accelerate launch --config_file {best.file}.yaml{flags} -m accel_sft math")


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'s' * (count != 1)}"


def _bold(text: str) -> str:
    return _styled(text, bold=True)


def _styled(text: str, **style: Any) -> str:
    return text if "NO_COLOR" in os.environ else click.style(text, **style)


@contextlib.contextmanager
def _progress(stream: TextIO, what: str) -> Iterator[None]:
    """Context manager that shows `what` is waited for, and for how long, in the terminal's last line.

    Without a terminal or without rich, standard output gets a line now and then, and standard error (used with --json)
    gets nothing.
    """
    if what and stream.isatty() and find_spec("rich"):
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=Console(file=stream), transient=True) as bar:
            bar.add_task(what, total=None)
            yield
        return
    with terminal.waiting(what) if what and stream is sys.stdout else contextlib.nullcontext():
        yield
