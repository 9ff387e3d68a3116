"""What the tools do with a task: commands that take its options, and evaluate, plan, check or export its data."""

import shlex
from collections.abc import Iterable
from typing import Any

import click
from click.core import ParameterSource

from accel_sft.api.config import CHECK, MODEL, PLAN, CheckConfig, EvaluateConfig, PlanConfig, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings
from accel_sft.api.task import Task
from accel_sft.api.task_file import recorded_name
from accel_sft.cli_options import NAMES_A_FILE
from accel_sft.cli_task import TaskCommand


class EvaluateCommand(TaskCommand):
    """The command that scores a model on a task; a task's options default to those of the run that `--model` is."""

    config_class, offered = EvaluateConfig, EvaluateConfig.OFFERED
    does = "Scores a model on this task's validation examples."

    def own_sections(self) -> dict[str, list[click.Option]]:
        help = "Evaluate on the files that the record of the run --model names, without naming them again."
        return {MODEL: [click.Option(["--same-data"], is_flag=True, help=help)]}

    def run(self, task: Task, config: EvaluateConfig) -> None:
        from accel_sft.commands.evaluate import run

        run(self.name, task, config)

    def usual(self, config: TrainConfig, given: Iterable[str]) -> dict[str, Any]:
        """Raises UserError if they name files and `--same-data` is not given: a run's folder may be another's, and name
        any file of this machine."""
        from accel_sft.io.run_dir import RunDir

        same_data = click.get_current_context().params["same_data"]
        record = RunDir.record_around(config.model)
        before = record["task_options"] if record and record["task"] == recorded_name(self.name) else {}
        if same_data and not before:
            raise UserError(
                f"--same-data: --model {config.model} is no run of {self.name}; name the data by its options"
            )
        mine = [s for s in self.offers[self.task_class] if s.name in before.keys() - {*given}]
        mine = [s for s in mine if HIDDEN not in str(before[s.name]) and not s.problem(before[s.name])]
        files = [s for s in mine if NAMES_A_FILE.search(s.name) and before[s.name] != s.default]
        if files and not same_data:
            named = " ".join(f"{s.flag} {shlex.quote(str(before[s.name]))}" for s in files)
            why = "its record names files, and those of a record are not read unasked"
            raise UserError(f"--model {config.model}: {why}; add --same-data, or {named}, or name others")
        return {s.name: before[s.name] for s in mine}


class PlanCommand(TaskCommand):
    """The command that predicts memory and speed of training a task under each launch file."""

    config_class = PlanConfig
    offered = frozenset(setting.name for setting in settings(PlanConfig))
    reads_rows = False
    does = (
        "Predicts memory and speed of its training under each launch file, before anything is loaded. Training's other "
        "options are accepted too: put `plan` before the task of any training command. No data is read. Exit status: "
        "0 if any launch file fits, 1 if none does."
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        several = next(option for option in self.params if option.name == "launch")
        several.multiple, several.callback = True, lambda ctx, param, values: ",".join(values or ()) or None
        self.sections = {PLAN: self.sections.pop(PLAN), **self.sections}
        self.listed -= self.offered - PlanConfig.OFFERED

    def run(self, task: Task, config: PlanConfig) -> None:
        from accel_sft.commands.plan import run

        run(self.name, task, config)

    def read(self, ctx: click.Context) -> tuple[TrainConfig, Task]:
        """Files that the task needs and that are not named have a placeholder: only training reads them."""
        try:
            return super().read(ctx)
        except UserError as error:
            files = [s for s in self.offers[self.task_class] if s.type is str and NAMES_A_FILE.search(s.name)]
            needed = [s for s in files if any(line.startswith(f"{s.flag}: ") for line in error.problems)]
            if not needed or any(ctx.params[s.name] is not None for s in needed):
                raise
        for setting in needed:
            ctx.params[setting.name] = setting.name.upper()
            ctx.set_parameter_source(setting.name, ParameterSource.COMMANDLINE)
        return super().read(ctx)


class CheckCommand(TaskCommand):
    """The command that audits a task's data. It takes every option of training, and lists those that matter."""

    config_class = CheckConfig
    reads_rows = False  # its report has what is missing, among the rest
    offered = frozenset(setting.name for setting in settings(CheckConfig))
    does = (
        "Audits this task's data as training would read it; no weights are loaded. Training's other options are "
        "accepted too: put `check` before the task of any training command."
    )

    def __init__(self, name: str, task_class: type[Task] | None, summary: str) -> None:
        super().__init__(name, task_class, summary)
        self.sections = {CHECK: self.sections.pop(CHECK), **self.sections}
        self.listed -= (
            self.offered - CheckConfig.OFFERED - {s.name for s in settings(CheckConfig) if s.section == CHECK}
        )

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
