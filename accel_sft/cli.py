"""The command group: one command per installed task, and the tools. Torch is imported inside commands only."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem

import accel_sft
from accel_sft.api import registry
from accel_sft.api.config import MODEL, TrainConfig
from accel_sft.api.options import HIDDEN, settings
from accel_sft.api.task import Task
from accel_sft.cli_options import EVALUATION, SectionOption, TaskCommand
from accel_sft.commands.launch_file import launch_file
from accel_sft.commands.new_task import new_task
from accel_sft.commands.tasks import tasks


class LazyTasks(click.Group):
    """A group whose task commands are known by metadata, and imported one at a time when one is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*registry.names(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        tool = super().get_command(ctx, cmd_name)
        if tool or (ctx.resilient_parsing and cmd_name not in registry.names()):
            return tool
        task_class = None if ctx.resilient_parsing else _load(ctx, cmd_name, self.commands)
        return self.task_command(cmd_name, task_class)

    def task_command(self, name: str, task_class: type[Task] | None) -> click.Command:
        """The command of a task; without a class while a shell completes, which imports no plugin."""
        raise NotImplementedError

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tools = [(name, command.get_short_help_str(90)) for name, command in self.commands.items()]
        for heading, rows in (("Tasks", list(registry.names().items())), ("Tools", tools)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """As click's own, without making a command of each task: that would import them all."""
        summaries = registry.names()
        summaries.update({name: command.get_short_help_str() for name, command in self.commands.items()})
        found = [CompletionItem(name, help=text) for name, text in summaries.items() if name.startswith(incomplete)]
        return found + click.Command.shell_complete(self, ctx, incomplete)


def _load(ctx: click.Context, name: str, tools: dict[str, click.Command]) -> type[Task]:
    if any(plugin.name == name for plugin in registry.plugins()):
        return registry.load(name)
    if name.startswith("-"):
        raise click.NoSuchOption(name, ctx=ctx)
    near = registry.suggestion(name, [*registry.names(), *tools])
    ctx.fail(f"no task or tool {name!r}{near}; `accel-sft tasks` lists the tasks that are installed here")


class _TrainGroup(LazyTasks):
    def task_command(self, name: str, task_class: type[Task] | None) -> click.Command:
        def train(task: Task, config: TrainConfig) -> None:
            _prepare(config)
            from accel_sft.commands.train import run

            run(name, task, config)

        summary = (
            f"{registry.summary_of(task_class, name)}\n\nTrains, evaluates and saves a model for this task."
            if task_class
            else ""
        )
        return TaskCommand(name, task_class, train, summary=summary)


class _EvaluateGroup(LazyTasks):
    def task_command(self, name: str, task_class: type[Task] | None) -> click.Command:
        def evaluate(task: Task, config: TrainConfig, base: str | None) -> None:
            _prepare(config)
            from accel_sft.commands.evaluate import run

            run(name, task, config, base)

        def as_in_its_run(config: TrainConfig) -> dict[str, Any]:
            from accel_sft.io.run_dir import RunDir

            record = RunDir.record_around(config.model)
            before = record["task_options"] if record and record["task"] == name else {}
            mine = [s for s in settings(task_class) if s.name in before and not s.problem(before[s.name])]
            return {s.name: before[s.name] for s in mine if before[s.name] != HIDDEN}

        base = SectionOption(
            ["--base"],
            metavar="TEXT",
            help="Evaluate this model too, side by side: hub id or local folder.",
            section=MODEL,
        )
        summary = (
            f"{registry.summary_of(task_class, name)}\n\nScores a model on this task's validation examples."
            if task_class
            else ""
        )
        return TaskCommand(
            name, task_class, evaluate, summary=summary, only=EVALUATION, extra=[base], usual=as_in_its_run
        )


def _prepare(config: TrainConfig) -> None:
    from accel_sft.launch.environment import prepare_environment

    prepare_environment(config.debug)


@click.group(cls=_TrainGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(accel_sft.__version__, prog_name="accel-sft")
def cli() -> None:
    """Fine-tune causal language models on tasks, each a small plugin.

    On several processes: accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft TASK
    """


@cli.group(cls=_EvaluateGroup)
def evaluate() -> None:
    """Score a model on a task's validation examples, beside its base if you name one."""


for _tool in (new_task, tasks, launch_file):
    cli.add_command(_tool)
