"""`accel-sft install`: installs a task's package into this environment by pip, and lists the tasks that are new."""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.launch.recordable import masked, masked_words

_NOT_A_NAME = re.compile(r"[/\\:@]|\.whl$|\.tar\.gz$|^\.")


@click.command()
@click.argument("name")
@click.argument("pip_options", nargs=-1, metavar="[-- PIP_OPTIONS]", type=click.UNPROCESSED)
def install(name: str, pip_options: Sequence[str]) -> None:
    """Install a task by pip into this environment: NAME is accel-sft-NAME, a folder, a wheel, a URL or git+URL.

    What stands behind -- is given to pip: accel-sft install mytask -- --no-index --find-links wheels
    """
    command = [sys.executable, "-m", "pip", "install", *pip_options, requirement(name)]
    shown = masked(name)
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            f"install {shown}: this environment has no pip; `{shlex.quote(sys.executable)} -m ensurepip` brings it, or "
            f"let another installer do it: uv pip install {shlex.quote(masked(command[-1]))}"
        )
    before = registry.plugins()
    click.echo(shlex.join(masked_words(command)))
    pip = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        text=True,
        errors="replace",
    )
    with pip:
        for line in pip.stdout or ():
            click.echo(masked(line), nl=False)  # pip hides the credentials of some URLs only
    if status := pip.returncode:
        raise UserError(f"install {shown}: pip ended with status {status}; what it printed above says why")
    importlib.invalidate_caches()
    came = [plugin for plugin in registry.plugins() if plugin not in before]
    for plugin in came:
        state = plugin.fault or plugin.summary
        click.echo(f"{plugin.name}  {plugin.distribution} {plugin.version}  {state}")
    if not came:
        click.echo("No task came that was not there before; `accel-sft tasks` lists those that are.")


def requirement(name: str) -> str:
    """The requirement for pip: accel-sft-mytask for `mytask`; a path, URL or git address stays as it is.

    Raises:
        UserError: the name is none of these.
    """
    if name.startswith("-") or not name.strip():
        raise UserError(f"NAME {name!r}: not a task's name; pip's own options stand behind --")
    if _NOT_A_NAME.search(name):
        if "://" not in name and not name.startswith("git+") and "@" not in name and not Path(name).exists():
            raise UserError(f"NAME {name}: no such file or folder")
        return name
    if not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?([=<>!~]=?[\w.*]+)?", name):
        raise UserError(f"NAME {name!r}: a task's name has lower-case letters, digits and hyphens; a folder, ./NAME")
    return name if name.startswith("accel-sft-") else f"accel-sft-{name}"
