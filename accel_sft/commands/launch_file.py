"""`accel-sft launch-file`: prints a shipped launch file for `accelerate launch`, for whoever has no checkout."""

from pathlib import Path

import click

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.api.registry import suggestion

FOLDER = Path(accel_sft.__file__).parent / "launch_files"
"""Package data; in a checkout a link to accelerate_configs/."""


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in _files() if name.startswith(incomplete)]


@click.command("launch-file")
@click.argument("name", required=False, shell_complete=_complete)
def launch_file(name: str | None) -> None:
    """Print a launch file, or list them: accel-sft launch-file z2 > z2.yaml

    Then: accelerate launch --config_file z2.yaml -m accel_sft TASK
    """
    files = _files()
    if name is None:
        width = max(map(len, files))
        for stem, path in files.items():  # a file's first line says what it is for
            purpose = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            click.echo(f"{stem:<{width}}  {purpose}")
        return
    stem = name.removesuffix(".yaml")
    if stem not in files:
        near = suggestion(stem, files) or f"; choose one of {', '.join(files)}"
        raise UserError(f"NAME {name!r}: no launch file has this name{near}")
    click.echo(files[stem].read_text(encoding="utf-8"), nl=False)


def shipped(name: str) -> Path | None:
    """The shipped launch file of this name, if there is one."""
    return _files().get(name)


def _files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
