"""Help that fits the terminal, from 60 columns on, and the option that shows the whole of it."""

import os
from collections.abc import Iterable

import click

_WHOLE = f"{__name__}.whole"
"""A key that is in a context's `meta` if `--help-all` was given."""


class HelpFormatter(click.HelpFormatter):
    """Keeps the column of options narrow: on a narrow terminal, most of the width is left to the help texts."""

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 34, col_spacing: int = 2) -> None:
        super().write_dl(rows, min(col_max, self.width * 2 // 5), col_spacing)


class HelpContext(click.Context):
    formatter_class = HelpFormatter

    def get_help(self) -> str:
        """Return the help on rank 0 of a launch; on other ranks, end the command without it."""
        if os.environ.get("RANK", "0") != "0":
            self.exit()
        return super().get_help()


def help_all_option() -> click.Option:
    """`--help-all`: prints the help with every option, and ends the command."""

    def show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            ctx.meta[_WHOLE] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Show every option and exit.",
    )


def shows_all(ctx: click.Context) -> bool:
    """Whether `--help-all` was given."""
    return _WHOLE in ctx.meta
