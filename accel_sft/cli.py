"""The command group: one command per installed task, and the tools. Torch is imported inside commands only."""

from __future__ import annotations

from typing import ClassVar

import click

import accel_sft
from accel_sft.api import registry
from accel_sft.cli_options import EvaluateCommand, TaskCommand
from accel_sft.commands.launch_file import launch_file
from accel_sft.commands.new_task import new_task
from accel_sft.commands.tasks import tasks


class TaskGroup(click.Group):
    """A group whose task commands are known by metadata, and imported one at a time when one is called."""

    task_command: ClassVar[type[TaskCommand]] = TaskCommand

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*registry.names(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """A tool or a task; while a shell completes, a task's command without its own options: no plugin is imported.

        Raises:
            UserError: the task cannot be used, and why.
        """
        if tool := super().get_command(ctx, cmd_name):
            return tool
        summaries = {plugin.name: plugin.summary for plugin in registry.plugins()}
        if cmd_name not in summaries:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            near = registry.suggestion(cmd_name, [*registry.names(), *self.commands])
            ctx.fail(f"no task or tool {cmd_name!r}{near}; `accel-sft tasks` lists the tasks that are installed here")
        task_class = None if ctx.resilient_parsing else registry.load(cmd_name)
        summary = registry.summary_of(task_class, cmd_name) if task_class else summaries[cmd_name]
        return self.task_command(cmd_name, task_class, summary)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tools = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        for heading, rows in (("Tasks", list(registry.names().items())), ("Tools", tools)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class EvaluateGroup(TaskGroup):
    """The tasks, to be evaluated."""

    task_command = EvaluateCommand


@click.group(cls=TaskGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(accel_sft.__version__, prog_name="accel-sft")
def cli() -> None:
    """Fine-tune causal language models on tasks, each a small plugin.

    On several processes: accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft TASK
    """


@cli.group(cls=EvaluateGroup)
def evaluate() -> None:
    """Score a model on a task's validation examples, beside its base if you name one."""


for _tool in (new_task, tasks, launch_file):
    cli.add_command(_tool)
