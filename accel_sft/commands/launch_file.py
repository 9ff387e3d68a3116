"""`accel-sft launch-file`: prints a shipped launch file for `accelerate launch`, so that no checkout is needed."""

import click

from accel_sft.api.errors import UserError
from accel_sft.api.registry import suggestion
from accel_sft.launch.info import FOLDER, shipped


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in shipped() if name.startswith(incomplete)]


@click.command("launch-file")
@click.argument("name", required=False, shell_complete=_complete)
def launch_file(name: str | None) -> None:
    """Print a launch file, or list them: accel-sft launch-file z2 > z2.yaml

    Then: accelerate launch --config_file z2.yaml -m accel_sft TASK

    A DeepSpeed JSON that a launch file names is printed by its own name, as z3_twin_flow.json; keep it beside the file.
    """
    files = shipped()
    if name is None:
        width = max(map(len, files))
        for stem, path in files.items():  # a file's first line says what it is for
            purpose = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
            click.echo(f"{stem:<{width}}  {purpose}")
        return
    files |= {path.name: path for path in FOLDER.glob("*.json")}
    stem = name.removesuffix(".yaml")
    if stem not in files:
        near = suggestion(stem, files) or f"; choose one of {', '.join(files)}"
        raise UserError(f"NAME {name!r}: no launch file has this name{near}")
    click.echo(files[stem].read_text(encoding="utf-8"), nl=False)
