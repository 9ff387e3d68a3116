"""The command line: a command for each task, and the tools. Only running one imports torch."""

import shlex
from collections.abc import Iterable
from typing import Any, ClassVar

import click

import accel_sft
from accel_sft.api import registry
from accel_sft.api.config import CHECK, CheckConfig, EvaluateConfig, PlanConfig, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import recorded_name, task_file
from accel_sft.cli_compare import CompareCommand
from accel_sft.cli_options import NAMES_A_FILE, USUAL
from accel_sft.cli_task import TaskCommand
from accel_sft.commands.doctor import doctor
from accel_sft.commands.generate import generate
from accel_sft.commands.install import install
from accel_sft.commands.launch_file import launch_file
from accel_sft.commands.merge import merge
from accel_sft.commands.new_task import new_task
from accel_sft.commands.push import push
from accel_sft.commands.report import report
from accel_sft.commands.tasks import tasks
from accel_sft.resilience.task_import import load_task


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
        before = record["task_options"] if record and record["task"] == recorded_name(self.name) else {}
        mine = [s for s in self.offers[self.task_class] if s.name in before.keys() - {*given}]
        mine = [s for s in mine if before[s.name] != HIDDEN and not s.problem(before[s.name])]
        if files := [s for s in mine if NAMES_A_FILE.search(s.name) and before[s.name] != s.default]:
            named = " ".join(f"{s.flag} {shlex.quote(str(before[s.name]))}" for s in files)
            why = "its record names files, and those of a record are not read unasked"
            raise UserError(f"--model {config.model}: {why}; add {named}, or name others")
        return {s.name: before[s.name] for s in mine}


class PlanCommand(TaskCommand):
    """The command that predicts memory and speed of training a task under each launch file."""

    config_class, offered = PlanConfig, PlanConfig.OFFERED
    does = (
        "Predicts memory and speed of its training under each launch file, before anything is loaded. Exit status: 0 "
        "if any launch file fits, 1 if none does."
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        several = next(option for option in self.params if option.name == "launch")
        several.multiple, several.callback = True, lambda ctx, param, values: ",".join(values or ()) or None

    def run(self, task: Task, config: PlanConfig) -> None:
        from accel_sft.commands.plan import run

        run(self.name, task, config)


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


class ExportDataCommand(TaskCommand):
    """The command that writes a task's rows as chat files."""

    offered = frozenset(("debug",))
    does = (
        "Writes its rows into OUT, a new folder, as train.jsonl and validation.jsonl, for other trainers: each line is "
        '{"messages": [...]}, with "weight": 0 in assistant turns that carry no loss.'
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        self.params.append(click.Argument(["out"], metavar="OUT"))

    def run(self, task: Task, config: TrainConfig) -> None:
        from accel_sft.commands.export_data import run

        run(task, click.get_current_context().params["out"])


class TaskGroup(click.Group):
    """A group whose task commands are known by metadata, and imported one at a time when one is called."""

    task_command: ClassVar[type[TaskCommand]] = TaskCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*registry.names(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """While a shell completes, no plugin is imported: a task's command is without the task's own options."""
        if tool := super().get_command(ctx, cmd_name):
            return tool
        if task_file(cmd_name) and not ctx.resilient_parsing:
            task_class = load_task(cmd_name, USUAL.hang_timeout)
            return self.task_command(cmd_name, task_class, registry.summary_of(task_class, f"The task of {cmd_name}."))
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


class CompareGroup(TaskGroup):
    task_command = CompareCommand


class PlanGroup(TaskGroup):
    task_command = PlanCommand


class CheckGroup(TaskGroup):
    task_command = CheckCommand


class ExportDataGroup(TaskGroup):
    task_command = ExportDataCommand


@click.group(cls=TaskGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(accel_sft.__version__, prog_name="accel-sft")
def cli() -> None:
    """Fine-tune causal language models on tasks, each a small plugin.

    TASK is an installed task's name, or a Python file that has one: ./mytask.py or ./mytask.py:MyTask.

    On several processes: accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft TASK
    """


@cli.group(cls=EvaluateGroup)
def evaluate() -> None:
    """Score a model on a task's validation examples, beside its base if you name one."""


@cli.group(cls=CompareGroup)
def compare() -> None:
    """Measure launch files and settings against each other: time, memory, loss, with every launch a real one."""


@cli.group(cls=PlanGroup)
def plan() -> None:
    """Predict memory and speed of training a task under each launch file."""


@cli.group(cls=CheckGroup)
def check() -> None:
    """Audit a task's data before training: what is wrong, at which line, and how to mend it."""


@cli.group("export-data", cls=ExportDataGroup)
def export_data() -> None:
    """Write a task's rows as chat files, for other trainers."""


for _tool in (doctor, report, generate, merge, push, new_task, install, tasks, launch_file):
    cli.add_command(_tool)
