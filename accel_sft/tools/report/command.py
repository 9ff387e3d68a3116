"""`accel-sft report`: one page from the folders of runs or comparisons."""

import os

import click

from accel_sft.api.errors import UserError


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option(
    "--output", type=click.Path(), default="report.html", metavar="FILE", help="The page.  [default: report.html]"
)
def report(runs: tuple[str, ...], output: str) -> None:
    """Make one page from runs or a comparison: curves, scores, answers.

    For example: accel-sft report runs/*

    Each RUN is the folder of a run, of an evaluation, or of a comparison. The page has the runs' curves,
    scores, answers and settings beside each other, and opens in any browser without a server or a network.
    """
    from accel_sft.io.files import page_file, write_atomically
    from accel_sft.io.terminal import wrapped
    from accel_sft.io.text import printable
    from accel_sft.tools.report.page import render
    from accel_sft.tools.report.runs import COMPARISON, named, read_comparison, read_run

    target = page_file(output, "--output")
    alone, comparisons = [], []
    problems: list[str] = []
    folders = named(list(runs))
    for name, path in folders.items():
        try:
            if (path / COMPARISON).exists():
                comparisons.append(read_comparison(path, name, alone=len(folders) == 1))
            else:
                alone.append(read_run(path, name))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    page = render(alone, comparisons)
    try:
        write_atomically(target, page)
    except OSError as error:
        raise UserError(f"--output {output}: cannot be written ({error.strerror}); name another file") from None
    every = [*alone, *(run for comparison in comparisons for run in comparison.runs)]
    for run in every:
        what = f"{run.status}: {run.reason}" if run.reason else run.status
        if run.status != "complete" or run.notes:
            click.echo(wrapped(printable(f"{run.name}: {'; '.join([what, *run.notes])}")))
    count = "1 run" if len(every) == 1 else f"{len(every)} runs"
    click.echo(f"{output}: {count}, {os.path.getsize(target) / 1000:,.0f} kB; open it in a browser")
