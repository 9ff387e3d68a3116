"""`accel-sft tasks`: lists the installed tasks, their versions, and the broken ones and why."""

import click

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.io.terminal import wrapped


@click.command()
def tasks() -> None:
    """List the installed tasks, their versions, and the broken ones and why."""
    found = registry.plugins()
    if not found:
        click.echo("No task is installed. `accel-sft new-task NAME` starts one of your own.")
    rows, broken = [], []
    for plugin in found:
        try:
            summary, status = registry.summary_of(registry.load_plugin(plugin), plugin.summary), "ok"
        except UserError as error:
            summary, status = plugin.summary, "broken"
            broken += error.problems
        rows.append((plugin.name, f"{plugin.distribution} {plugin.version}", status, summary))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(wrapped(line, indent=sum(widths[:-1]) + 2 * len(widths[:-1])))
    if broken:
        click.echo("\nBroken, and why:")
        click.echo("\n".join(wrapped(f"  {line}") for line in broken))
