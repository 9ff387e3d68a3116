"""A table of the commands that take a task: their options, those that `--help` shows, and the function to run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from accel_sft.api.config import MODEL, SECTIONS, TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.options import Setting, settings
from accel_sft.api.task_file import recorded_name
from accel_sft.api.tool_configs import CheckConfig, EvaluateConfig, PlanConfig, RehearseConfig, SampleConfig
from accel_sft.cli.options import COMPARISON, LEARNING_CURVE

_TRAINING = frozenset(setting.name for setting in settings(TrainConfig))


@dataclass(frozen=True, kw_only=True)
class TaskTool:
    """A command that every task has.

    Attributes:
        run: called with the task's name, the task and the settings. If the tool `compares`, it is called with the name,
            the task's class, the settings that may have several values, the command's parameters, and a function that
            parses the words of one run.
        takes: names of the settings that the command takes; None: all.
        lists: names of the settings that `--help` lists; None: the basic ones.
        missing_rows: what happens if data files are missing. "refused": reading the command line fails; "reported": the
            tool reports them; "unread": the tool reads no data, and required options that name files may be left out.
    """

    run: Callable[..., None]
    summary: str
    does: str = ""
    config_class: type[TrainConfig] = TrainConfig
    takes: frozenset[str] | None = None
    lists: frozenset[str] | None = None
    repeated: frozenset[str] = frozenset()
    missing_rows: str = "refused"
    argument: click.Argument | None = None
    own_options: Mapping[str, Sequence[click.Option]] = field(default_factory=dict)
    from_run: Callable[[str, Sequence[Setting], str, Mapping[str, Any]], dict[str, Any]] | None = None
    compares: bool = False

    def settings(self) -> list[Setting]:
        """Return the settings that the command takes, of the trainer and of the tool."""
        return [s for s in settings(self.config_class) if self.takes is None or s.name in self.takes]

    @property
    def section(self) -> str:
        """Heading of the tool's own settings, which come first in its help and are all listed; "" if it has none."""
        return next((s.section for s in settings(self.config_class) if s.section not in SECTIONS), "")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _runs(module: str, function: str = "run") -> Callable[..., None]:
    """Return a function that imports `module`, which may take seconds, and calls its `function`."""

    def run(*given: Any) -> None:
        from accel_sft.launch.environment import importing

        with importing():
            command = importlib.import_module(module)
        getattr(command, function)(*given)

    return run


def _settings_of_the_run(
    name: str, task_settings: Sequence[Setting], model: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the task's settings that the run of `--model` recorded, except those in `given`; {} if there is no run."""
    from accel_sft.io.run_dir import RunDir
    from accel_sft.io.run_record import recorded_options

    same_data = click.get_current_context().params["same_data"]
    if given.get("url"):  # --model is then a server's name for a model, not a run
        if same_data:
            raise UserError("--same-data: a server records no data; with --url, name the data by the task's options")
        return {}
    record = RunDir.record_around(model)
    if record and record["task"] != recorded_name(name):
        record = None
    if same_data and not (record and record["task_options"] and not record.get("in_card")):
        raise UserError(f"--same-data: --model {model} is not a run of {name}; name the data by the task's options")
    return recorded_options(record, task_settings, given, f"--model {model}", same_data=same_data) if record else {}


_MOST_USED = _names("model init_from adapter max_length global_batch_size epochs max_steps")
_SAME_DATA = "Use the files that the run of --model recorded."
_OF_MODELS = (
    "model revision trust_remote_code dtype attn_implementation max_length eval_batch_size max_new_tokens seed debug "
    "dry_run hang_timeout offload thinking template_date control_tokens chat_template url key_from timeout"
)
_RUN_WORDS = click.Argument(["run_words"], nargs=-1, metavar="[-- OPTIONS]", type=click.UNPROCESSED)
_AS_TRAINING = "It takes all options of training: put the command's name before the task in any training command."
TRAIN = TaskTool(summary="Train, evaluate and save a model for this task.", run=_runs("accel_sft.commands.train"))
TOOLS = {
    "evaluate": TaskTool(
        summary="Score a model, and its base if you name one, on a task's validation examples.",
        run=_runs("accel_sft.commands.evaluate"),
        config_class=EvaluateConfig,
        takes=_names(f"{_OF_MODELS} eval_limit output_dir base"),
        own_options={MODEL: [click.Option(["--same-data"], is_flag=True, help=_SAME_DATA)]},
        from_run=_settings_of_the_run,
    ),
    "sample": TaskTool(
        summary="Sample answers to a task's training prompts, and score them: rows to fine-tune on.",
        does="OUT, a new file, gets a row per answer in chat form with its `score`; with --keep best one right answer "
        "per prompt, with --keep pairs `prompt`, `chosen` and `rejected`. No validation example is sampled.",
        run=_runs("accel_sft.commands.sample", "command"),
        config_class=SampleConfig,
        takes=_names(f"{_OF_MODELS} samples temperature top_p rows keep prefer threshold"),
        own_options={MODEL: [click.Option(["--same-data"], is_flag=True, help=_SAME_DATA)]},
        from_run=_settings_of_the_run,
        argument=click.Argument(["out"], metavar="OUT.jsonl"),
    ),
    "compare": TaskTool(
        summary="Compare launch files and settings by real launches: time, memory and loss.",
        does="Every option of the trainer and the task may have several values: write --micro-batch-size 1,32, or "
        "repeat the option. If values may have commas, only repeat it: --lora-target-modules, --tracker, --mix, "
        "--train-only, and the task's text options. Every run gets the options after -- unchanged.",
        run=_runs("accel_sft.tools.compare.command"),
        takes=_TRAINING - _names("output_dir resume dry_run debug"),
        lists=frozenset(),
        own_options=COMPARISON,
        argument=_RUN_WORDS,
        compares=True,
    ),
    "how-much": TaskTool(
        summary="Train on growing parts of a task's rows, and forecast what more rows would bring.",
        does="It compares values of --train-limit and --seed. The folder, interrupts and the options after -- work as "
        "in `compare`. Each part of a file's rows is a random sample, and every larger part contains it.",
        run=_runs("accel_sft.tools.how_much.command"),
        takes=_TRAINING - _names("output_dir resume dry_run debug train_limit seed"),
        lists=_MOST_USED,
        own_options=LEARNING_CURVE,
        argument=_RUN_WORDS,
        compares=True,
    ),
    "plan": TaskTool(
        summary="Predict memory and speed of training a task under each launch file.",
        does=f"{_AS_TRAINING} No data is read. Exit status: 0 if at least one launch file fits, else 1.",
        run=_runs("accel_sft.tools.plan.command"),
        config_class=PlanConfig,
        lists=_MOST_USED,
        repeated=_names("launch"),
        missing_rows="unread",
    ),
    "check": TaskTool(
        summary="Audit a task's data before training: what is wrong, at which line, and how to fix it.",
        does=f"{_AS_TRAINING} No weights are loaded.",
        run=_runs("accel_sft.tools.check.command"),
        config_class=CheckConfig,
        lists=_MOST_USED,
        missing_rows="reported",
    ),
    "rehearse": TaskTool(
        summary="Try a whole run on a shrunk model before you pay for it: what would fail, when, and the fix.",
        does="It takes minutes on CPUs, with the real options, data, tokenizer, template and launch file, and a random "
        f"model of the same family. {_AS_TRAINING} Exit status: 0 if no stage of the run would fail, else 1.",
        run=_runs("accel_sft.tools.rehearse.command"),
        config_class=RehearseConfig,
        lists=_MOST_USED,
        missing_rows="reported",
    ),
    "export-data": TaskTool(
        summary="Write a task's rows as chat files, for other trainers.",
        does="OUT, a new folder, gets train.jsonl and validation.jsonl: each line is "
        '{"messages": [...]}, with "weight": 0 in assistant turns that carry no loss.',
        run=_runs("accel_sft.commands.export_data", "command"),
        takes=_names("debug"),
        argument=click.Argument(["out"], metavar="OUT"),
    ),
}
"""The commands that a task has in addition to training."""
