"""Command-line options made from dataclass fields, and their values read back with every problem reported at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from accel_sft.api import registry
from accel_sft.api.config import RUN, TrainConfig
from accel_sft.api.config_file import BadOptions, load_yaml
from accel_sft.api.errors import UserError
from accel_sft.api.options import Setting, settings
from accel_sft.api.task import Task
from accel_sft.models.tiny import TINY_DEFAULTS
from accel_sft.resilience.exit import ExitHandler

EVALUATION = frozenset(
    ("model", "trust_remote_code", "dtype", "attn_implementation", "max_length", "eval_limit", "eval_batch_size")
) | {"max_new_tokens", "generate_with", "output_dir", "seed", "debug", "dry_run", "hang_timeout"}
"""The trainer's settings that `evaluate` offers."""
_IN_EVALUATION = {
    "model": {"default": dataclasses.MISSING, "help": "A run, saved weights or an adapter by folder, or a hub id."},
    "output_dir": {"help": "A new folder for result.json, report.md and the answers; default: none is written."},
}
"""Defaults and help texts that differ in `evaluate`."""


class _Value(click.ParamType):
    """Converts what it can and leaves bad values to `Setting.problem`: click would stop at the first one."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.name = "|".join(setting.choices) or {str: "text", int: "integer", float: "number"}[setting.type]

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return self.name if self.setting.choices else self.name.upper()

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.setting.type is str or not isinstance(value, str):
            return value
        try:
            return self.setting.type(value)
        except ValueError:
            return value

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        if self.setting.name in ("model", "output_dir", "init_from", "resume") or self.setting.name.endswith("_file"):
            return [CompletionItem(incomplete, type="file")]
        return [CompletionItem(choice) for choice in self.setting.choices if choice.startswith(incomplete)]


class SectionOption(click.Option):
    """An option that `--help` lists under a heading."""

    def __init__(self, *args: Any, section: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


def make_option(setting: Setting, section: str) -> SectionOption:
    """The click option of a setting. Its default is None, which marks an option that was not given."""
    help = f"{setting.help} {_brackets(setting)}".strip()
    if setting.type is bool:
        flags = f"{setting.flag}/--no-{setting.flag[2:]}"
        return SectionOption([flags, setting.name], default=None, help=help, section=section)
    return SectionOption([setting.flag, setting.name], type=_Value(setting), help=help, section=section)


def _brackets(setting: Setting) -> str:
    usual, tiny = getattr(_USUAL, setting.name, None), TINY_DEFAULTS.get(setting.name)
    parts = []
    if setting.required:
        parts.append("required")
    elif setting.default is not None:
        parts.append(f"default: {_shown(setting.default)}")
    elif usual is not None and tiny not in (None, usual):
        parts.append(f"default: {_shown(usual)}, {_shown(tiny)} for tiny")
    elif usual is not None:
        parts.append(f"default: {_shown(usual)}")
    elif tiny is not None:
        parts.append(f"default: {_shown(tiny)} for tiny")
    if setting.min is not None and setting.max is not None:
        parts.append(f"{setting.min:g} to {setting.max:g}")
    elif setting.min is not None:
        parts.append(f"at least {setting.min:g}")
    elif setting.max is not None:
        parts.append(f"at most {setting.max:g}")
    return f"[{'; '.join(parts)}]" if parts else ""


_USUAL = TrainConfig(model="").resolved({})


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) if default != "" else "empty"


class TaskCommand(click.Command):
    """A command with a task's options and the trainer's, grouped by section in its help.

    Args:
        task_class: the loaded task, or None while a shell completes, which imports no plugin.
        run: called with task, config and the values of `extra` options, all problems having been reported.
        only: names of the trainer's settings to offer; all by default.
        extra: further click options of this command.
        usual: makes, from the trainer's settings, the task's settings that neither command line nor file give.
    """

    def __init__(
        self,
        name: str,
        task_class: type[Task] | None,
        run: Callable[..., None],
        *,
        summary: str,
        only: Iterable[str] | None = None,
        extra: Iterable[SectionOption] = (),
        usual: Callable[[TrainConfig], Mapping[str, Any]] = lambda config: {},
    ) -> None:
        self.task_class, self.run, self.usual = task_class, run, usual
        self.task_settings = settings(task_class) if task_class else []
        self.train_settings = [
            s if only is None else dataclasses.replace(s, **_IN_EVALUATION.get(s.name, {}))
            for s in settings(TrainConfig)
            if only is None or s.name in only
        ]
        config = SectionOption(
            ["--config", "config_file"],
            type=click.Path(),
            metavar="FILE",
            help="These options in YAML, one `name: value` a line; the command line wins.",
            section=RUN,
        )
        self.extra = [config, *extra]
        params = [make_option(s, s.section or f"Task {name}") for s in self.task_settings]
        params += [make_option(s, s.section) for s in self.train_settings]
        completing = {"ignore_unknown_options": True} if task_class is None else None
        super().__init__(name, params=params + self.extra, help=summary, context_settings=completing)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record:
                sections.setdefault(getattr(param, "section", RUN), []).append(record)
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows, col_max=34)

    def invoke(self, ctx: click.Context) -> None:
        extra = {option.name: ctx.params[option.name] for option in self.extra}
        if isinstance(ctx.obj, ExitHandler):
            ctx.obj.debug = bool(ctx.params["debug"])
        task, config = self.read(ctx, extra.pop("config_file"))
        if isinstance(ctx.obj, ExitHandler):
            ctx.obj.debug = config.debug
        self.run(task, config, **extra)

    def read(self, ctx: click.Context, config_file: str | None) -> tuple[Task, TrainConfig]:
        """Task and trainer settings from the command line over the YAML file over the defaults.

        Raises:
            UserError: every problem of the file, of each value and between values, together. What cannot be known
                while another value is wrong or the file cannot be read is not reported.
        """
        given = {k: v for k, v in ctx.params.items() if ctx.get_parameter_source(k) is ParameterSource.COMMANDLINE}
        problems: list[str] = []
        from_file: dict[str, Any] = {}
        wrong_in_file, readable = set(), True
        if config_file:
            try:
                from_file = load_yaml(config_file, TrainConfig, self.task_class)
            except BadOptions as error:
                problems += error.problems
                from_file, wrong_in_file = error.usable, error.wrong
            except UserError as error:
                problems += error.problems
                readable = False
        made = []
        for offered, make in ((self.train_settings, _build_config), (self.task_settings, self._build_task)):
            usual = self.usual(made[0]) if made else {}
            values = {
                s.name: source[s.name] for source in (usual, from_file, given) for s in offered if s.name in source
            }
            wrong = {s.name: line for s in offered if s.name in given and (line := s.problem(given[s.name]))}
            needed = {s.name: f"{s.flag}: a value is needed" for s in offered if s.required and s.name not in values}
            missing = [line for name, line in needed.items() if readable and name not in wrong_in_file]
            problems += [*wrong.values(), *missing]
            try:  # bad values are left out, so that conflicts between the other settings are reported too
                made += [] if needed or not readable else [make({k: v for k, v in values.items() if k not in wrong})]
            except UserError as error:
                left_out = {s.flag for s in offered if s.name in wrong_in_file or s.name in wrong}
                problems += [line for line in error.problems if left_out.isdisjoint(re.findall(r"--[\w-]+", line))]
        if problems:
            raise UserError(*dict.fromkeys(problems))
        config, task = made
        return task, config

    def _build_task(self, values: dict[str, Any]) -> Task:
        return registry.build(self.name, self.task_class, values)


def _build_config(values: dict[str, Any]) -> TrainConfig:
    config = TrainConfig(**values)
    problems = config.problems()
    if problems:
        raise UserError(*problems)
    return config
