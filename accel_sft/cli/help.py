"""Help that fits the terminal, from 60 columns on, and the option that shows the whole of it."""

import os

import click

_WHOLE = f"{__name__}.whole"
"""The key of a context's `meta` that is there while all options are shown."""


class HelpFormatter(click.HelpFormatter):
    """On a narrow terminal the column of names leaves more than half of the width to what they mean."""

    def write_dl(self, rows: list[tuple[str, str]], col_max: int = 34, col_spacing: int = 2) -> None:
        super().write_dl(rows, min(col_max, self.width * 2 // 5), col_spacing)


class HelpContext(click.Context):
    formatter_class = HelpFormatter

    def get_help(self) -> str:
        """The help, and an end without it on other ranks of a launch than the first."""
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
