"""The command of a task: its options made from settings, read and checked together. Only running it imports torch."""

import collections
import re
from collections.abc import Iterable
from typing import Any, ClassVar

import click
from click.core import ParameterSource

from accel_sft.api import registry
from accel_sft.api.config import ADAPTER, DATA, EVAL, MODEL, OPTIM, RUN, TrainConfig
from accel_sft.api.config_file import load_yaml, task_in
from accel_sft.api.errors import UserError
from accel_sft.api.options import Setting, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import same_task
from accel_sft.cli_help import HelpContext, help_all_option, shows_all
from accel_sft.cli_options import OTHER_NAMES, help_of, make_option
from accel_sft.data.rows import absent_rows
from accel_sft.resilience.exit import ExitHandler

_SHORT_HEADINGS = {ADAPTER: MODEL, DATA: "Training", OPTIM: "Training", EVAL: "Training"}
"""Under which `--help` lists the few options of these sections."""


class TaskCommand(click.Command):
    """A command with a task's options and the trainer's, grouped by section in its help. This one trains.

    `--help` lists the options in `listed`, `--help-all` all.

    Args:
        task_class: the loaded task, or None while a shell completes, which imports no plugin.
        summary: the task in a line.
    """

    context_class = HelpContext
    config_class: ClassVar[type[TrainConfig]] = TrainConfig
    offered: ClassVar[frozenset[str]] = frozenset(setting.name for setting in settings(TrainConfig))
    reads_rows: ClassVar[bool] = True
    """Whether rows that are not there are refused when the command line is read: importing torch takes seconds."""
    does: ClassVar[str] = "Trains, evaluates and saves a model for this task."

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        self.task_class = task_class
        task_settings = settings(task_class) if task_class else []
        train_settings = [setting for setting in settings(self.config_class) if setting.name in self.offered]
        self.offers = {self.config_class: train_settings, task_class: task_settings}
        self.sections: dict[str, list[click.Option]] = self.own_sections()
        self.listed = {option.name for options in self.sections.values() for option in options}
        self.listed |= {"config_file", *(setting.name for setting in task_settings)}
        self.listed |= {setting.name for setting in train_settings if setting.basic}
        for setting in (*task_settings, *train_settings):
            self.sections.setdefault(setting.section or f"Task {name}", []).extend(self.make_options(setting))
        help = "These options in YAML; the command line wins."
        config = click.Option(["--config", "config_file"], type=click.Path(), metavar="FILE", help=help)
        self.sections[RUN] += [config, help_all_option()]
        params = [option for options in self.sections.values() for option in options]
        _refuse_clashes(name, params)
        completing = {"ignore_unknown_options": True} if task_class is None else None
        super().__init__(name, params=params, help=f"{summary}\n\n{self.does}", context_settings=completing)

    def own_sections(self) -> dict[str, list[click.Option]]:
        """Options that are not settings of a run, by the heading above them."""
        return {}

    def make_options(self, setting: Setting) -> list[click.Option]:
        return [make_option(setting)]

    def run(self, task: Task, config: TrainConfig) -> None:
        from accel_sft.commands.train import run

        run(self.name, task, config)

    def usual(self, config: TrainConfig, given: Iterable[str]) -> dict[str, Any]:
        """The task's settings besides those `given` by the command line or a file, if not the task's defaults."""
        return {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        whole = shows_all(ctx)
        sections: dict[str, list[tuple[str, str] | None]] = {}
        for heading, options in self.sections.items():
            rows = sections.setdefault(heading if whole else _SHORT_HEADINGS.get(heading, heading), [])
            rows += [o.get_help_record(ctx) if whole else self._short_row(ctx, o) for o in options]
        sections[RUN].append(self.get_help_option(ctx).get_help_record(ctx))
        for heading, rows in sections.items():
            if shown := [row for row in rows if row]:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if not whole:
            formatter.write_paragraph()
            formatter.write_text(f"Every option: {ctx.command_path} --help-all")

    def _short_row(self, ctx: click.Context, option: click.Option) -> tuple[str, str] | None:
        """An option without its limits, a switch that is off by default without its --no- form; None if not listed."""
        if option.name not in self.listed:
            return None
        setting = next((s for offered in self.offers.values() for s in offered if s.name == option.name), None)
        record = option.get_help_record(ctx)
        if setting is None or record is None:
            return record
        if setting.type is bool and setting.default is False:
            return setting.flag, setting.help
        return record[0], help_of(setting, limits=False)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Raises UserError with the mend, for what people bring from other trainers."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if hint := OTHER_NAMES.get(error.option_name):
                raise UserError(f"{error.option_name} is no option of {ctx.command_path}: {hint}") from None
            raise
        except click.UsageError as error:
            if "unexpected extra argument" in error.message and any(param.multiple for param in self.params):
                error.message += "; each value needs its option, as in --train-file A --train-file B"
            raise

    def invoke(self, ctx: click.Context) -> None:
        from accel_sft.launch.environment import prepare_environment

        ending = ctx.ensure_object(ExitHandler)
        ending.debug = bool(ctx.params["debug"])
        config, task = self.read(ctx)
        ending.debug = config.debug
        prepare_environment(config.debug)
        self.run(task, config)

    def read(self, ctx: click.Context) -> tuple[TrainConfig, Task]:
        """Trainer and task settings from the command line over the YAML file over the defaults.

        Raises:
            UserError: every problem of the file, of each value and between values, together. What cannot be known
                while another value is wrong or the file cannot be read is not reported.
        """
        given = {k: v for k, v in ctx.params.items() if ctx.get_parameter_source(k) is ParameterSource.COMMANDLINE}
        every = [setting for offered in self.offers.values() for setting in offered]
        problems = [line for s in every if s.name in given and (line := s.problem(given[s.name]))]
        from_file: dict[str, Any] = {}
        if "config_file" in given:
            try:
                from_file, of_file = load_yaml(given["config_file"], *self.offers)
            except UserError as error:
                raise UserError(*error.problems, *problems) from None
            problems = [*of_file, *self._other_task(given["config_file"]), *problems]
        built: list[Any] = []
        for cls, offered in self.offers.items():
            mine = {**from_file, **given}
            values = {**(self.usual(*built, mine) if built else {}), **mine}
            wrong = {s.name: s.flag for s in offered if s.name in values and s.problem(values[s.name])}
            usable = {s.name: values[s.name] for s in offered if s.name in values and s.name not in wrong}
            missing = [s for s in offered if s.required and s.name not in usable]
            problems += [f"{s.flag}: a value is needed" for s in missing if s.name not in wrong]
            try:  # without the wrong values, so that conflicts between the other settings are reported too
                built += [] if missing else [registry.build(self.name, cls, usable)]
            except UserError as error:
                flags = set(wrong.values())
                problems += [line for line in error.problems if flags.isdisjoint(re.findall(r"--[\w-]+", line))]
        if not problems and self.reads_rows and built[0].resume == "off":  # a finished run needs them no more
            names = {s.flag: getattr(built[1], s.name) for s in self.offers[self.task_class] if s.rows}
            problems = [line for flag, name in names.items() if name for line in absent_rows(name, flag)]
        if problems:
            raise UserError(*dict.fromkeys(problems))
        return tuple(built)

    def _other_task(self, path: str) -> list[str]:
        named = task_in(path)
        if named is None or same_task(named, self.name):
            return []
        return [f"--config {path}: task: {named}, and the command line says {self.name}; leave out one of them"]


def _refuse_clashes(task: str, params: Iterable[click.Option]) -> None:
    """An option of training is never a task's (`api/contract.py`); one that a tool adds may be, and only it suffers.

    Raises:
        UserError: two options of the command have the same name.
    """
    flags = collections.Counter(flag for option in params for flag in (*option.opts, *option.secondary_opts))
    if clash := " and ".join(flag for flag, times in flags.items() if times > 1):
        raise UserError(
            f"task {task}: option {clash} is this command's own and the task's too: rename it in the task to use this "
            "command"
        )
