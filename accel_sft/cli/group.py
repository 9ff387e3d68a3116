"""The command line: a command for each task, and the tools. Only running a command imports torch."""

import difflib
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

import accel_sft
from accel_sft.api import registry
from accel_sft.api.config_file import OTHER_COMMANDS, task_in
from accel_sft.api.errors import UserError
from accel_sft.api.task_file import task_file
from accel_sft.cli.task_command import TaskCommand
from accel_sft.cli.task_tools import TOOLS, TRAIN, TaskTool
from accel_sft.commands.generate import generate
from accel_sft.commands.listings import completion, launch_file, tasks
from accel_sft.commands.merge import merge
from accel_sft.commands.new_task import new_task
from accel_sft.commands.push import push
from accel_sft.commands.serve import serve
from accel_sft.tools.doctor.command import doctor
from accel_sft.tools.parity.command import parity
from accel_sft.tools.report.command import report
from accel_sft.tools.verify.command import verify


class TaskGroup(click.Group):
    """A group that knows its task commands from metadata, and imports a task when its command is called."""

    def __init__(self, *args: Any, tool: TaskTool = TRAIN, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.tool = tool

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """If `--config FILE` comes before the task's name, move the name to the front: `--config run.yaml math` becomes
        `math --config run.yaml`. If no name comes after the file, read the name from the file."""
        path, behind = _config_file(args) if args and args[0].startswith("-") else (None, 0)
        if path and args[behind:] and not args[behind].startswith("-"):
            args = [args[behind], *args[:behind], *args[behind + 1 :]]
        elif path:
            named = None if ctx.resilient_parsing and not Path(path).is_file() else task_in(path)
            if named is None and not ctx.resilient_parsing:
                raise UserError(f"--config {path}: no task in it; add `task: NAME`, or name a task before the options")
            args = [*([named] if named else []), *args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            near = difflib.get_close_matches(error.option_name, ["--help", "--config", "--version"], cutoff=0.75)
            if ctx.resilient_parsing or near:
                raise
            example = f"`{ctx.command_path} TASK {error.option_name} ...`"
            raise UserError(f"{error.option_name}: name a task before its options, as in {example}") from None

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*registry.names(), *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a task's or a tool's command. During shell completion, only shipped plugins are imported."""
        if tool := super().get_command(ctx, cmd_name):
            return tool
        summaries = {plugin.name: plugin.summary for plugin in registry.plugins()}
        if not task_file(cmd_name) and cmd_name not in summaries:
            if ctx.resilient_parsing or cmd_name.startswith("-"):
                return None
            near = registry.suggestion(cmd_name, [*registry.names(), *self.commands])
            hint = f"{near}; `accel-sft tasks` lists the tasks that are installed here"
            hint = f"; {OTHER_COMMANDS[cmd_name]}" if cmd_name in OTHER_COMMANDS else hint
            ctx.fail(f"no task or tool {cmd_name!r}{hint}")
        imported = not ctx.resilient_parsing or (cmd_name in registry.SHIPPED and cmd_name in registry.names())
        task_class = registry.load(cmd_name) if imported else None
        summary = summaries.get(cmd_name, f"The task of {cmd_name}.")
        summary = registry.summary_of(task_class, summary) if task_class else summary
        return TaskCommand(cmd_name, task_class, summary, self.tool)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        tools = [(name, command.get_short_help_str(120)) for name, command in self.commands.items()]
        for heading, rows in (("Tasks", [*registry.names().items()]), ("Tools", tools)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
        if self.tool is not TRAIN:
            formatter.write_paragraph()
            formatter.write_text(f"Options: {ctx.command_path} TASK --help")

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names of commands, and paths of files that may hold a task."""
        if incomplete.startswith((".", "/", "~")) or "/" in incomplete:
            return [CompletionItem(incomplete, type="file")]
        return super().shell_complete(ctx, incomplete)


def _config_file(args: list[str]) -> tuple[str | None, int]:
    """The value of `--config` among these words, and the index of the word after it; (None, 0) without `--config`."""
    for place, word in enumerate(args):
        if word == "--":
            break
        if word == "--config":
            return next(iter(args[place + 1 :]), None), place + 2
        if word.startswith("--config="):
            return word.partition("=")[2], place + 1
    return None, 0


_SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
_SETTINGS["token_normalize_func"] = lambda name: name.replace("_", "-")  # users of other trainers write --learning_rate


@click.group(cls=TaskGroup, context_settings=_SETTINGS)
@click.version_option(accel_sft.__version__, prog_name="accel-sft")
@click.option(
    "--config", metavar="FILE", expose_value=False, help="YAML file with options; a run's run.yaml repeats the run."
)
def cli() -> None:
    """Fine-tune causal language models on tasks. Each task is a small plugin.

    TASK is the name of an installed task, or a Python file with a task: ./mytask.py or ./mytask.py:MyTask.

    On several processes: accelerate launch --config_file accelerate_configs/z2.yaml -m accel_sft TASK
    """


for _name, _task_tool in TOOLS.items():
    cli.add_command(TaskGroup(_name, help=_task_tool.summary, tool=_task_tool))
_RUNS = doctor, report, verify, generate, merge, serve, parity, push
for _tool in (*_RUNS, new_task, tasks, launch_file, completion):
    cli.add_command(_tool)
