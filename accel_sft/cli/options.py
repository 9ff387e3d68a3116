"""A setting as an option of the command line: its type, its completion, and its help with default and limits."""

import functools
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from accel_sft.api.config import TrainConfig
from accel_sft.api.options import NAMES_A_FILE, Setting
from accel_sft.models.tiny import TINY_DEFAULTS

USUAL = TrainConfig(model="").resolved({})
_OF_ADAPTERS = TrainConfig(model="", adapter="lora").resolved({})
_METAVARS = {str: "TEXT", int: "INTEGER", float: "NUMBER"}


def make_option(setting: Setting, repeated: bool = False) -> list[click.Option]:
    """The click option of a setting. It has no default, so that all values are read and checked in one place.

    Args:
        repeated: whether the option may be given several times, which joins the values by commas, as for names of rows.
    """
    help = help_of(setting)
    if setting.type is bool:
        return [click.Option([f"{setting.flag}/--no-{setting.flag[2:]}", setting.name], default=None, help=help)]
    option = click.Option(
        [setting.flag, setting.name],
        type=setting.read,
        metavar="|".join(setting.choices) or _METAVARS[setting.type],
        shell_complete=functools.partial(_complete, setting),
        help=help,
        multiple=setting.rows or repeated,
        callback=_joined if setting.rows or repeated else None,
    )
    return [option]


def _joined(ctx: click.Context, param: click.Parameter, values: Sequence[str] | None) -> str | None:
    """Join by commas the values of an option that may be repeated; return None if it was not given."""
    return ",".join(values) if values else None


def help_of(setting: Setting, *, limits: bool = True) -> str:
    """Return a setting's help with its default and, if asked for, its limits."""
    return f"{setting.help} {_brackets(setting, limits)}".strip()


def _complete(setting: Setting, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    if setting.name in ("model", "base", "init_from", "resume", "launch", "html") or NAMES_A_FILE.search(setting.name):
        return [CompletionItem(incomplete, type="file")]
    return [CompletionItem(choice) for choice in setting.choices if choice.startswith(incomplete)]


def _brackets(setting: Setting, limits: bool) -> str:
    usual = getattr(USUAL, setting.name, None) if setting.default is None else setting.default
    tiny = TINY_DEFAULTS.get(setting.name)
    defaults = [] if usual is None else [_shown(usual)]
    if setting.default is None and (adapted := getattr(_OF_ADAPTERS, setting.name, None)) != usual:
        defaults.append(f"{_shown(adapted)} for an adapter")
    if tiny not in (None, usual):
        defaults.append(f"{_shown(tiny)} for tiny")
    parts = [f"default: {', '.join(defaults)}"] if defaults else []
    if setting.required:
        parts = ["required"]
    if limits and setting.min is not None and setting.max is not None:
        parts.append(f"{setting.min:g} to {setting.max:g}")
    elif limits:
        ends = {"at least": setting.min, "at most": setting.max}
        parts += [f"{word} {limit:g}" for word, limit in ends.items() if limit is not None]
    return f"[{'; '.join(parts)}]" if parts else ""


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) if default != "" else "empty"
