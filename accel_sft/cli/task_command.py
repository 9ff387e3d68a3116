"""The command of a task: makes options from settings, reads and checks them together, and prints help that fits the
terminal. Only running a command imports torch."""

import collections
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from accel_sft.api import registry
from accel_sft.api.config import ADAPTER, DATA, EVAL, MODEL, OPTIM, RUN, TrainConfig
from accel_sft.api.config_file import OTHER_NAMES, load_yaml, task_in
from accel_sft.api.errors import UserError
from accel_sft.api.limits import OF_ADAPTERS
from accel_sft.api.options import NAMES_A_FILE, Setting, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import same_task
from accel_sft.cli.options import help_of, make_list_option, make_option
from accel_sft.cli.task_tools import TRAIN, TaskTool
from accel_sft.io.run_dir import absent_weights
from accel_sft.resilience.exit import ExitHandler
from accel_sft.rows.sources import absent_rows

_HELP_ALL = f"{__name__}.help_all"
"""A key that is in a context's `meta` if `--help-all` was given."""
_SHORT_HEADINGS = {ADAPTER: MODEL, DATA: "Training", OPTIM: "Training", EVAL: "Training"}
"""The sections that `--help` lists under another heading, with few of their options; `--help-all` moves none."""


def _show_all(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[_HELP_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


_YAML = "YAML file with these options; flags override it."
_CONFIG = click.Option(["--config", "config_file"], type=click.Path(), metavar="FILE", help=_YAML)
_EAGER: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False, "callback": _show_all}
_ALL = click.Option(["--help-all"], help="Show every option and exit.", **_EAGER)


class TaskCommand(click.Command):
    """A command with a task's options and the trainer's, grouped by section in its help.

    `--help` lists the options in `listed`, `--help-all` lists all. `task_class` may be None during shell completion.
    """

    name: str

    def __init__(self, name: str, task_class: type[Task] | None, summary: str, tool: TaskTool = TRAIN) -> None:
        self.task_class, self.tool = task_class, tool
        self.task_settings = settings(task_class) if task_class else []
        train_settings = tool.settings()
        self.offers: dict[Any, list[Setting]] = {tool.config_class: train_settings, task_class: self.task_settings}
        own = {tool.section: (), **tool.own_options} if tool.section else tool.own_options
        self.sections = {heading: [*options] for heading, options in own.items()}
        self.listed = {"config_file", *(option.name for options in own.values() for option in options)}
        self.listed |= {setting.name for setting in self.task_settings}
        basic = [setting for setting in train_settings if setting.basic]
        self.listed |= {
            s.name for s in basic if tool.lists is None or s.name in tool.lists or s.section == tool.section
        }
        for setting in (*self.task_settings, *train_settings):
            options = (make_list_option if tool.compares else make_option)(setting, setting.name in tool.repeated)
            self.sections.setdefault(setting.section or f"Task {name}", []).extend(options)
        self.sections[RUN] += [_CONFIG, _ALL]
        params: list[click.Parameter] = [option for options in self.sections.values() for option in options]
        _refuse_clashes(name, params)
        params += [tool.argument] if tool.argument else []
        completing = {"ignore_unknown_options": True} if task_class is None else None
        help = f"{tool.summary}\n\n{tool.does}\n\nThe task {name}: {summary}"
        super().__init__(name, params=params, help=help, context_settings=completing)

    def _words_of_a_run(self, ctx: click.Context) -> Callable[[Sequence[str]], Any]:
        """Return a function that parses the words of a run's command line. It returns the names of the options among
        the words, and a function that makes the trainer's settings and the task from the words."""
        trains = TaskCommand(self.name, self.task_class, "")

        def parse(words: Sequence[str]) -> tuple[set[str], Callable[[], tuple[TrainConfig, Task]]]:
            of_run = trains.make_context(self.name, [*words], parent=ctx.parent)
            given = {name for name in of_run.params if _is_typed(of_run, name)}
            return given, lambda: trains.read(of_run)

        return parse

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        all_options = _HELP_ALL in ctx.meta
        sections: dict[str, list[tuple[str, str] | None]] = {}
        for heading, options in self.sections.items():
            rows = sections.setdefault(heading if all_options else _SHORT_HEADINGS.get(heading, heading), [])
            rows += [o.get_help_record(ctx) if all_options else self._short_row(ctx, o) for o in options]
        if help_option := self.get_help_option(ctx):
            sections[RUN].append(help_option.get_help_record(ctx))
        for heading, rows in sections.items():
            if shown := [row for row in rows if row]:
                with formatter.section(heading):
                    formatter.write_dl(shown)
        if not all_options:
            formatter.write_paragraph()
            formatter.write_text(f"Every option: {ctx.command_path} --help-all")

    def _short_row(self, ctx: click.Context, option: click.Option) -> tuple[str, str] | None:
        """Return an option's row for `--help`: without its limits, and without --no- if it is off by default. None for
        an option that `--help` does not list."""
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
        """For options of other trainers, raise a UserError that says what to write instead."""
        words, flags = [*args], {flag for param in self.params for flag in param.opts}
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption:
            names = dict.fromkeys(word.partition("=")[0].replace("_", "-") for word in words)
            if foreign := [name for name in names if name in OTHER_NAMES and name not in flags]:
                problem = f"is not an option of {ctx.command_path}"
                raise UserError(*(f"{name} {problem}: {OTHER_NAMES[name]}" for name in foreign)) from None
            raise
        except click.UsageError as error:
            if "unexpected extra argument" not in error.message:
                raise
            advice = "each value needs its option (--train-file A --train-file B); a switch has no value (--compile)"
            raise click.UsageError(f"{error.message}; {advice}", error.ctx) from None

    def invoke(self, ctx: click.Context) -> None:
        if self.tool.compares:
            self.tool.run(self.name, self.task_class, self.offers, ctx.params, self._words_of_a_run(ctx))
            return
        from accel_sft.launch.environment import prepare_environment

        ending = ctx.ensure_object(ExitHandler)
        ending.debug = bool(ctx.params["debug"])
        config, task = self.read(ctx)
        unused = [s.flag for s in self.offers[type(config)] if s.name in OF_ADAPTERS and _is_typed(ctx, s.name)]
        if unused and config.adapter == "none":
            advice = "add --adapter lora, or leave this option out"
            raise UserError(*(f"{flag} has no effect without an adapter; {advice}" for flag in unused))
        ending.debug = config.debug
        prepare_environment(config.debug)
        self.tool.run(self.name, task, config)

    def read(self, ctx: click.Context) -> tuple[TrainConfig, Task]:
        """Return the trainer's settings and the task. If the tool reads no data, missing files get dummy names."""
        given = {name: value for name, value in ctx.params.items() if _is_typed(ctx, name)}
        try:
            return self._read(given)
        except UserError as error:
            files = [s for s in self.task_settings if s.type is str and NAMES_A_FILE.search(s.name)]
            needed = [s.name for s in files if any(line.startswith(f"{s.flag}: ") for line in error.problems)]
            if self.tool.missing_rows != "unread" or not needed or given.keys() & {*needed}:
                raise
        return self._read(given | {name: name.upper() for name in needed})

    def _read(self, given: dict[str, Any]) -> tuple[TrainConfig, Task]:
        """Return the settings and the task: the YAML file overrides the defaults, and the command line overrides both.

        A UserError has all problems: of the file, of single values, and of values that conflict.
        """
        every = [setting for offered in self.offers.values() for setting in offered]
        problems = [line for s in every if s.name in given and (line := s.problem(given[s.name]))]
        from_file: dict[str, Any] = {}
        if path := given.get("config_file"):
            try:
                from_file, of_file = load_yaml(path, *self.offers, given=given)
            except UserError as error:
                raise UserError(*error.problems, *problems) from None
            named = task_in(path)
            if named and not same_task(named, self.name):
                of_file.append(f"--config {path}: the file names the task {named}, not {self.name}; leave one out")
            problems = [*of_file, *problems]
        built: list[Any] = []
        for cls, offered in self.offers.items():
            values, of_run = {**from_file, **given}, dict[str, Any]()
            if built and self.tool.from_run:
                of_run = self.tool.from_run(self.name, self.task_settings, built[0].model, values)
            values = {**of_run, **values}
            wrong = {s.name: s.flag for s in offered if s.name in values and s.problem(values[s.name])}
            usable = {s.name: values[s.name] for s in offered if s.name in values and s.name not in wrong}
            missing = [s for s in offered if s.required and s.name not in usable]
            problems += [f"{s.flag}: a value is needed" for s in missing if s.name not in wrong]
            try:  # without the invalid values, so that conflicts between the other settings are reported too
                built += [] if missing else [self._built(cls, usable, of_run)]
            except UserError as error:
                flags = set(wrong.values())
                problems += [line for line in error.problems if flags.isdisjoint(re.findall(r"--[\w-]+", line))]
        # a resumed run may need no rows
        if not problems and self.tool.missing_rows == "refused" and built[0].resume == "off":
            config, task = built
            names = {s.flag: getattr(task, s.name) for s in self.task_settings if s.rows}
            problems = [line for flag, name in names.items() if name for line in absent_rows(name, flag)]
            models = {"--model": config.model, "--base": getattr(config, "base", None)}
            models = {} if getattr(config, "url", None) else models  # --model then names a server's model
            problems += [line for flag, name in models.items() if name for line in absent_weights(name, flag)]
        if problems:
            raise UserError(*dict.fromkeys(problems))
        return tuple(built)

    def _built(self, cls: type, values: dict[str, Any], of_run: dict[str, Any]) -> Any:
        """Build settings from `values`. Values from a run's record (`of_run`) are left out if they conflict with given
        ones."""
        try:
            return registry.build(self.name, cls, values)
        except UserError as error:
            blamed = {line.split()[0].strip(":") for line in error.problems}
            unfit = {s.name: s.flag for s in self.task_settings if s.name in of_run and s.flag in blamed}
            if not unfit or values.keys() <= of_run.keys():
                raise
            flags = ", ".join(unfit.values())
            print(f"note: options of the run's record that conflict with yours are left out: {flags}", file=sys.stderr)
        return registry.build(self.name, cls, {name: value for name, value in values.items() if name not in unfit})


def _is_typed(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _refuse_clashes(task: str, params: Iterable[click.Parameter]) -> None:
    """Refuse a tool if an option of its own is also the task's; `api/task.py` checks the options of training."""
    flags = collections.Counter(flag for option in params for flag in (*option.opts, *option.secondary_opts))
    if clash := " and ".join(flag for flag, times in flags.items() if times > 1):
        raise UserError(f"task {task}: this command already has an option {clash}; rename it in the task")
