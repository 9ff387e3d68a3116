"""The command `compare` of a task: the task's command, with options that may have several values, and its own."""

from collections.abc import Callable, Sequence

import click
from click.core import ParameterSource

from accel_sft.api.config import TrainConfig
from accel_sft.api.options import Setting
from accel_sft.api.task import Task
from accel_sft.cli_options import help_of, make_option
from accel_sft.cli_task import TaskCommand


class CompareCommand(TaskCommand):
    """The command that measures a task's training under several launches and settings, each a run of its own."""

    offered = TaskCommand.offered - {"output_dir", "resume", "dry_run", "debug"}
    does = (
        "Measures this task's training under every combination of the values that are given, each a real launch.\n\n"
        "Every option of the trainer and the task may have several values: --micro-batch-size 1,32, or the option once "
        "for each. Only the latter where a value may have commas itself: --lora-target-modules, --tracker, and the "
        "task's text options. What stands behind -- is given to every run as it is."
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        self.listed = {option.name for option in comparison_options()} | {"config_file"}
        self.params.append(click.Argument(["run_words"], nargs=-1, metavar="[-- OPTIONS]", type=click.UNPROCESSED))

    def own_sections(self) -> dict[str, list[click.Option]]:
        return {"Comparison": comparison_options()}

    def make_options(self, setting: Setting) -> list[click.Option]:
        return make_list_option(setting)

    def invoke(self, ctx: click.Context) -> None:
        from accel_sft.commands.compare import run

        trains = TaskCommand(self.name, self.task_class, "")

        def parse(words: Sequence[str]) -> tuple[set[str], Callable[[], tuple[TrainConfig, Task]]]:
            of_run = trains.make_context(self.name, [*words], parent=ctx.parent)
            given = {k for k in of_run.params if of_run.get_parameter_source(k) is ParameterSource.COMMANDLINE}
            return given, lambda: trains.read(of_run)

        run(self.name, self.task_class, self.offers, ctx.params, parse)


def make_list_option(setting: Setting) -> list[click.Option]:
    """The options of a setting that may have several values: by commas, and by repetition. A switch has two options."""
    option, help = make_option(setting), help_of(setting)
    given = {"multiple": True, "help": help, "shell_complete": option.shell_complete}
    if setting.type is bool:
        off = click.Option([f"--no-{setting.flag[2:]}", f"no_{setting.name}"], is_flag=True, help="Off; on,off: both.")
        return [click.Option([setting.flag, setting.name], is_flag=False, flag_value="on", metavar="", **given), off]
    return [click.Option([setting.flag, setting.name], metavar=option.metavar, **given)]


def comparison_options() -> list[click.Parameter]:
    """The options of `compare` itself."""

    def several(flag: str, metavar: str, help: str) -> click.Option:
        return click.Option([flag], multiple=True, metavar=metavar, help=help)

    return [
        several("--launch", "NAME,...", "Launch files by shipped name or path, and single (no launcher, the default)."),
        several("--num-processes", "N,...", "The launcher's: processes; not for single, which is one."),
        several("--mixed-precision", "no|fp16|bf16,...", "The launcher's: precision."),
        click.Option(
            ["--repeat"],
            type=click.IntRange(1),
            show_default=True,
            default=3,
            help="Rounds: how often each cell is run.",
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
        click.Option(["--dry-run"], is_flag=True, help="Print each cell and its command, and stop."),
    ]
