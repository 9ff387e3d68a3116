"""The first steps of commands that take a trained model: require one process, find the weights, take the settings."""

import dataclasses
import os
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import click

from accel_sft.api.errors import UserError
from accel_sft.api.options import chosen
from accel_sft.api.tool_configs import EvaluateConfig
from accel_sft.io.run_dir import RunDir
from accel_sft.resilience.exit import ExitHandler

LONGEST_ANSWER = 512
"""Maximum number of tokens of an answer, unless the command line or the run says otherwise."""
Config = TypeVar("Config", bound=EvaluateConfig)
_OF_RUN = ("max_length", "max_new_tokens", "thinking", "template_date", "control_tokens")


def begin_command(ctx: click.Context, *, debug: bool, problems: Sequence[str] = ()) -> None:
    """Prepare this process for a one-process command; raise UserError for problems, or in a launch of several
    processes."""
    ctx.ensure_object(ExitHandler).debug = debug
    if lines := [*problems, *one_process(str(ctx.info_name))]:
        raise UserError(*lines)
    from accel_sft.launch.environment import prepare_environment

    prepare_environment(debug)


def one_process(command: str) -> list[str]:
    """Return a line that refuses several ranks, which would all do the same work; [] for one process."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return []
    return [f"{command} runs in one process: start it as `accel-sft {command}`, without accelerate launch"]


class Trained:
    """A trained model as the command line names it: a run (its best/ weights, or else its final/), saved weights, an
    adapter or a hub id. `record` is the run.json of the run that wrote the weights, or None."""

    def __init__(self, name: str) -> None:
        self.name, self.weights = name, RunDir.weights_in(name)
        self.record, self.notes = RunDir.record_around(name), RunDir.choice_in(name)
        self.in_4bit = bool(self.record and self.record["config"].get("load_in_4bit"))
        self.raw_text = bool(self.record and self.record.get("raw_text"))

    @property
    def precision(self) -> str | None:
        """The run's precision. In another precision, the model may answer differently."""
        from accel_sft.launch.precision import precision_in_record

        return precision_in_record(self.record) if self.record else None

    def settings(self, config: Config, *more: str) -> Config:
        """Return `config`, resolved. If a setting of `_OF_RUN` or `more` was not given, it takes the run's value."""
        if problems := config.problems():
            raise UserError(*problems)
        if self.record:
            of_run = {name: self.record["config"].get(name) for name in (*_OF_RUN, *more)}
            of_run["max_new_tokens"] = of_run["max_new_tokens"] or self.record.get("max_new_tokens")
            given = chosen(config, of_run)
            taken = {name: value for name, value in of_run.items() if value is not None and name not in given}
            config = dataclasses.replace(config, **taken)
            if problems := config.problems():
                raise UserError(*(f"{problem}; the value is from the run.json of {self.name}" for problem in problems))
        config = config.resolved({})
        return dataclasses.replace(config, template_date=config.template_date or time.strftime("%Y-%m-%d"))

    def sources(self, base: str | None, revision: str | None = None) -> dict[str, Any]:
        """Return the sources to load, by side: "model" without a base, else "base" and "tuned". The base "auto" is the
        model that the run or the adapter started from."""
        from accel_sft.models.source import as_it_began, began_with, find_source

        source = find_source(self.weights, revision=revision)
        if not base:
            return {"model": source}
        if base != "auto":
            return {"base": find_source(RunDir.weights_in(base)), "tuned": source}
        began = find_source(began_with(source, self.record))
        return {"base": as_it_began(began, source, self.record), "tuned": source}
