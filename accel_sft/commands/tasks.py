"""`accel-sft tasks`: lists the installed tasks with their versions, and why a task is broken."""

import json

import click

from accel_sft.api import registry
from accel_sft.api.errors import UserError
from accel_sft.io.terminal import wrapped


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON, with versions, entry points and why one is broken.")
def tasks(as_json: bool) -> None:
    """List the installed tasks, their versions, and the broken ones and why."""
    found = []
    for plugin in registry.plugins():
        summary, problems = plugin.summary, []
        try:
            summary = registry.summary_of(registry.load_plugin(plugin), plugin.summary)
        except UserError as error:
            problems = [*error.problems]
        found.append((plugin, summary, problems))
    if as_json:
        click.echo(json.dumps([_described(*each) for each in found], indent=2, ensure_ascii=False))
        return
    if not found:
        click.echo("No task is installed. `accel-sft new-task NAME` starts one of your own.")
    rows = [
        (plugin.name, f"{plugin.distribution} {plugin.version}", "broken" if problems else "ok", summary)
        for plugin, summary, problems in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        click.echo(wrapped(line, indent=sum(widths[:-1]) + 2 * len(widths[:-1])))
    if broken := [line for _, _, problems in found for line in problems]:
        click.echo("\nBroken, and why:")
        click.echo("\n".join(wrapped(f"  {line}") for line in broken))


def _described(plugin: registry.Plugin, summary: str, problems: list[str]) -> dict[str, object]:
    return {
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "entry_point": plugin.target,
        "summary": summary,
        "usable": not problems,
        "problems": problems,
    }
