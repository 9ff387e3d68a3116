"""The options of `compare` and of `how-much`: those of a run, which may have several values, and their own."""

from typing import Any

import click

from accel_sft.api.options import Setting
from accel_sft.cli.options import help_of, make_option


def make_list_option(setting: Setting, repeated: bool) -> list[click.Option]:
    """Return the options of a setting that may have several values, by commas or repetition: two for a switch."""
    [option] = make_option(setting, repeated)
    given: dict[str, Any] = {"multiple": True, "help": help_of(setting), "shell_complete": option.shell_complete}
    if setting.type is bool:
        off = click.Option([f"--no-{setting.flag[2:]}", f"no_{setting.name}"], is_flag=True, help="Off; on,off: both.")
        return [click.Option([setting.flag, setting.name], is_flag=False, flag_value="on", metavar="", **given), off]
    return [click.Option([setting.flag, setting.name], metavar=option.metavar, **given)]


def comparison_options() -> dict[str, list[click.Option]]:
    """The options of `compare` itself, below their heading."""

    def several(flag: str, metavar: str, help: str) -> click.Option:
        return click.Option([flag], multiple=True, metavar=metavar, help=help)

    own = [
        several("--launch", "NAME,...", "Launch files by shipped name or path, and single (no launcher, the default)."),
        several("--num-processes", "N,...", "The launcher's: processes; not for single, which is one."),
        several("--mixed-precision", "no|fp16|bf16,...", "The launcher's: precision."),
        click.Option(
            ["--repeat"],
            type=click.IntRange(1),
            show_default=True,
            default=3,
            help="Rounds: how often each setting is run.",
        ),
        click.Option(
            ["--discard-steps"],
            type=click.IntRange(0),
            show_default=True,
            default=3,
            help="First steps of each run that are not counted: they warm up.",
        ),
        click.Option(
            ["--time-limit"],
            type=click.FloatRange(0, min_open=True),
            metavar="MINUTES",
            show_default=True,
            default=60.0,
            help="After which a run is ended; that is a result too.",
        ),
        click.Option(
            ["--keep-weights"], is_flag=True, help="Keep the weights of each run; they are deleted otherwise."
        ),
        click.Option(
            ["--output-dir"],
            metavar="TEXT",
            help="The comparison's own folder, to go on with after an interrupt; default runs/compare-<task>-<time>.",
        ),
        click.Option(["--dry-run"], is_flag=True, help="Print each setting and its command, and stop."),
    ]
    return {"Comparison": own}


def how_much_options() -> dict[str, list[click.Option]]:
    """The options of `how-much` itself, and those of a comparison that it takes."""
    own = [
        click.Option(
            ["--sizes"], metavar="N,...", help="Three or more numbers of rows; default: all, and four halvings of them."
        ),
        click.Option(
            ["--seeds"],
            type=click.IntRange(1, 100),
            show_default=True,
            default=2,
            help="Trainings of each number of rows, which differ in their seed.",
        ),
    ]
    [shared] = comparison_options().values()
    return {"Learning curve": own + [option for option in shared if option.name not in ("repeat", "discard_steps")]}
