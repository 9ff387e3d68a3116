"""Makes command-line options from settings (in a comparison, each takes several values), and defines the options that
only comparisons have."""

import functools
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
    """Return a setting's click option. It has no default, so that all values are read and checked in one place. If the
    option may be `repeated`, or names rows, its values are joined by commas."""
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
        callback=(lambda ctx, param, values: ",".join(values or ()) or None) if setting.rows or repeated else None,
    )
    return [option]


def make_list_option(setting: Setting, repeated: bool) -> list[click.Option]:
    """Return the options for a setting with several values (by commas or repetition): two for a switch, else one."""
    [option] = make_option(setting, repeated)
    given: dict[str, Any] = {"multiple": True, "help": help_of(setting), "shell_complete": option.shell_complete}
    if setting.type is bool:
        negated, both = f"--no-{setting.flag[2:]}", f"Off. To compare both: {setting.flag} on,off."
        off = click.Option([negated, f"no_{setting.name}"], is_flag=True, help=both)
        return [click.Option([setting.flag, setting.name], is_flag=False, flag_value="on", metavar="", **given), off]
    return [click.Option([setting.flag, setting.name], metavar=option.metavar, **given)]


def help_of(setting: Setting, *, limits: bool = True) -> str:
    """Return a setting's help with its default and, if `limits`, its limits."""
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
        parts += [f"{words} {limit:g}" for words, limit in ends.items() if limit is not None]
    return f"[{'; '.join(parts)}]" if parts else ""


def _shown(default: Any) -> str:
    if isinstance(default, bool):
        return "on" if default else "off"
    return f"{default:g}" if isinstance(default, float) else str(default) if default != "" else "empty"


def _own(flag: str, help: str, **settings: Any) -> click.Option:
    return click.Option([flag], help=help, show_default="default" in settings, **settings)


_ROUNDS = (
    _own("--repeat", "Number of rounds; each setting runs once per round.", type=click.IntRange(1), default=3),
    _own("--discard-steps", "First steps of each run, which the results leave out.", type=click.IntRange(0), default=3),
)
_LAUNCHES = (
    _own("--launch", "Launch files; single: no launcher (the default).", multiple=True, metavar="NAME,..."),
    _own("--num-processes", "Processes of the launcher; one for single.", multiple=True, metavar="N,..."),
    _own("--mixed-precision", "The launcher's precision.", multiple=True, metavar="no|fp16|bf16,..."),
)
_RUNS = (
    _own("--time-limit", "Minutes per run.", type=click.FloatRange(0, min_open=True), metavar="MINUTES", default=60.0),
    _own("--keep-weights", "Keep the weights of each run; they are deleted otherwise.", is_flag=True),
    _own("--output-dir", "The comparison's folder; default: runs/compare-<task>-<time>.", metavar="TEXT"),
    _own("--dry-run", "Print each setting and its command, and stop.", is_flag=True),
)
_CURVE = (
    _own("--sizes", "Three or more numbers of rows; default: all, a half, a quarter, and so on.", metavar="N,..."),
    _own("--seeds", "Number of trainings for each number of rows.", type=click.IntRange(1, 100), default=2),
)
COMPARISON = {"Comparison": (*_LAUNCHES, *_ROUNDS, *_RUNS)}
LEARNING_CURVE = {"Learning curve": (*_CURVE, *_LAUNCHES, *_RUNS)}
"""Options of `compare` and of `how-much` that are not settings, by their heading in the help."""
