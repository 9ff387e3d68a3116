"""The command line: options made from settings, a command for each task, the tools. Only running one imports torch."""

import re
import shlex
from collections.abc import Iterable
from typing import Any, ClassVar

import click
from click.core import ParameterSource

import accel_sft
from accel_sft.api import registry
from accel_sft.api.config import CHECK, RUN, CheckConfig, EvaluateConfig, TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings
from accel_sft.api.task import Task
from accel_sft.cli_options import NAMES_A_FILE, USUAL, make_option
from accel_sft.commands.launch_file import launch_file
from accel_sft.commands.new_task import new_task
from accel_sft.commands.tasks import tasks
from accel_sft.resilience.exit import ExitHandler
from accel_sft.resilience.task_import import load_task


class TaskCommand(click.Command):
    """A command with a task's options and the trainer's, grouped by section in its help. This one trains.

    Args:
        task_class: the loaded task, or None while a shell completes, which imports no plugin.
        summary: the task in a line.
    """

    config_class: ClassVar[type[TrainConfig]] = TrainConfig
    offered: ClassVar[frozenset[str]] = frozenset(setting.name for setting in settings(TrainConfig))
    does: ClassVar[str] = "Trains, evaluates and saves a model for this task."

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        self.task_class = task_class
        task_settings = settings(task_class) if task_class else []
        train_settings = [setting for setting in settings(self.config_class) if setting.name in self.offered]
        self.offers = {self.config_class: train_settings, task_class: task_settings}
        self.sections: dict[str, list[click.Option]] = {}
        for setting in (*task_settings, *train_settings):
            self.sections.setdefault(setting.section or f"Task {name}", []).append(make_option(setting))
        help = "These options in YAML, one `name: value` a line; the command line wins."
        config = click.Option(["--config", "config_file"], type=click.Path(), metavar="FILE", help=help)
        self.sections[RUN].append(config)
        params = [option for options in self.sections.values() for option in options]
        completing = {"ignore_unknown_options": True} if task_class is None else None
        super().__init__(name, params=params, help=f"{summary}\n\n{self.does}", context_settings=completing)

    def run(self, task: Task, config: TrainConfig) -> None:
        from accel_sft.commands.train import run

        run(self.name, task, config)

    def usual(self, config: TrainConfig, given: Iterable[str]) -> dict[str, Any]:
        """The task's settings besides those `given` by the command line or a file, if not the task's defaults."""
        return {}

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, options in self.sections.items():
            more = [self.get_help_option(ctx)] if heading == RUN else []
            if rows := [row for option in (*options, *more) if (row := option.get_help_record(ctx))]:
                with formatter.section(heading):
                    formatter.write_dl(rows, col_max=34)

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
            problems = [*of_file, *problems]
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
        if problems:
            raise UserError(*dict.fromkeys(problems))
        return tuple(built)


class EvaluateCommand(TaskCommand):
    """The command that scores a model on a task; a task's options default to those of the run that `--model` is."""

    config_class, offered = EvaluateConfig, EvaluateConfig.OFFERED
    does = "Scores a model on this task's validation examples."

    def run(self, task: Task, config: EvaluateConfig) -> None:
        from accel_sft.commands.evaluate import run

        run(self.name, task, config)

    def usual(self, config: TrainConfig, given: Iterable[str]) -> dict[str, Any]:
        """Raises UserError if they name files: a run's folder may be another's, and name any file of this machine."""
        from accel_sft.io.run_dir import RunDir

        record = RunDir.record_around(config.model)
        before = record["task_options"] if record and record["task"] == self.name else {}
        mine = [s for s in self.offers[self.task_class] if s.name in before.keys() - {*given}]
        mine = [s for s in mine if before[s.name] != HIDDEN and not s.problem(before[s.name])]
        if files := [s for s in mine if NAMES_A_FILE.search(s.name) and before[s.name] != s.default]:
            named = " ".join(f"{s.flag} {shlex.quote(str(before[s.name]))}" for s in files)
            why = "its record names files, and those of a record are not read unasked"
            raise UserError(f"--model {config.model}: {why}; add {named}, or name others")
        return {s.name: before[s.name] for s in mine}


class CheckCommand(TaskCommand):
    """The command that audits a task's data. It takes every option of training; its help has those that matter."""

    config_class = CheckConfig
    offered = frozenset(setting.name for setting in settings(CheckConfig))
    does = (
        "Audits this task's data as training would read it; no weights are loaded. Training's other options are "
        "accepted too: put `check` before the task of any training command."
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        self.sections = {CHECK: self.sections.pop(CHECK), **self.sections}
        unlisted = self.offered - CheckConfig.OFFERED - {s.name for s in settings(CheckConfig) if s.section == CHECK}
        for option in self.params:
            option.hidden = option.name in unlisted

    def run(self, task: Task, config: CheckConfig) -> None:
        from accel_sft.commands.check import run

        run(self.name, task, config)


class TaskGroup(click.Group):
    """A group whose task commands are known by metadata, and imported one at a time when one is called."""

    task_command: ClassVar[type[TaskCommand]] = TaskCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*registry.names(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """While a shell completes, no plugin is imported: a task's command is without the task's own options."""
        if tool := super().get_command(ctx, cmd_name):
            return tool
        summaries = {plugin.name: plugin.summary for plugin in registry.plugins()}
        if cmd_name not in summaries:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            near = registry.suggestion(cmd_name, [*registry.names(), *self.commands])
            ctx.fail(f"no task or tool {cmd_name!r}{near}; `accel-sft tasks` lists the tasks that are installed here")
        task_class = None if ctx.resilient_parsing else load_task(cmd_name, USUAL.hang_timeout)
        summary = registry.summary_of(task_class, cmd_name) if task_class else summaries[cmd_name]
        return self.task_command(cmd_name, task_class, summary)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tools = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        for heading, rows in (("Tasks", list(registry.names().items())), ("Tools", tools)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class EvaluateGroup(TaskGroup):
    task_command = EvaluateCommand


class CheckGroup(TaskGroup):
    task_command = CheckCommand


@click.group(cls=TaskGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(accel_sft.__version__, prog_name="accel-sft")
def cli() -> None:
    """Fine-tune causal language models on tasks, each a small plugin.

    On several processes: accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft TASK
    """


@cli.group(cls=EvaluateGroup)
def evaluate() -> None:
    """Score a model on a task's validation examples, beside its base if you name one."""


@cli.group(cls=CheckGroup)
def check() -> None:
    """Audit a task's data before training: what is wrong, at which line, and how to mend it."""


for _tool in (new_task, tasks, launch_file):
    cli.add_command(_tool)
