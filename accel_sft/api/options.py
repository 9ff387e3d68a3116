"""Settings as dataclass fields. A field states type, default, help and limits, for the command line, YAML and tests."""

import dataclasses
import math
import re
import typing
from collections.abc import Iterable, Sequence
from typing import Any

_EXPECTED = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
_TYPES = {hint: (kind, hint is not kind) for kind in _EXPECTED for hint in (kind, kind | None)}
"""Maps a field's annotation to the setting's type and to whether the setting may be None."""
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
NAMES_A_FILE = re.compile(r"(^|_)(file|path|dir|folder)s?$")
"""Matches the names of options that name files."""
_SHOWN = 80
"""Maximum number of characters of a value that a message repeats."""


def option(
    default: Any = dataclasses.MISSING,
    *,
    help: str,
    choices: Sequence[str] | None = None,
    min: float | None = None,
    max: float | None = None,
    section: str = "",
    basic: bool = False,
    rows: bool = False,
) -> Any:
    """A dataclass field that is also a command-line option.

    Args:
        default: the value when the option is not given; without a default, the option is required.
        help: one line for `--help`; name the unit.
        min, max: inclusive limits of a number.
        basic: for an option of the trainer, whether `--help` lists it (`--help-all` lists all). `--help` lists every
            option of a task.
        rows: whether a `str` option names rows for `read_rows`. It may then be given several times (the names are
            joined by commas), and a missing file or folder is refused before anything is loaded.
    """
    if isinstance(default, (list, dict, set)):
        raise TypeError(f"option(default={default!r}): a default is shared between runs; use an immutable value")
    limits = {"help": help, "choices": tuple(choices or ()), "min": min, "max": max}
    limits |= {"section": section, "basic": basic, "rows": rows}
    return dataclasses.field(default=default, metadata={__name__: limits})


HIDDEN = "***"
"""Recorded in place of the value of an option whose name marks it as a secret, such as `api_key`."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field: `type` is str, int, float or bool; if `optional`, the value may also be None."""

    name: str
    type: type
    optional: bool
    default: Any
    help: str = ""
    choices: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None
    section: str = ""
    basic: bool = False
    rows: bool = False

    @property
    def flag(self) -> str:
        """The option's name on the command line, such as `--max-length` for `max_length`."""
        return flag_of(self.name)

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    def read(self, text: str) -> Any:
        """Convert a text from the command line or a file; if that fails, return the text, which `problem` reports."""
        try:
            return _SWITCH.get(text.lower(), text) if self.type is bool else self.type(text)
        except ValueError:
            return text

    def problem(self, value: Any) -> str | None:
        """Return what is wrong with `value` for this setting, or None."""
        if value is None:
            return None if self.optional else f"{self.flag}: a value is needed"
        if isinstance(value, int) and value.bit_length() > 63:  # too large for a tensor, perhaps even to print
            return f"{self.flag}: the number has {value.bit_length()} bits; the maximum is 63"
        accepted: tuple[Any, ...] = (int, float) if self.type is float else (self.type,)
        if not isinstance(value, accepted) or (isinstance(value, bool) and self.type is not bool):
            return f"{self.flag} {_represented(value)}: expected {_EXPECTED[self.type]}"
        if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):  # surrogates: bytes that are not UTF-8
            return f"{self.flag} {shown(value)}: has a NUL or bytes that are not UTF-8; remove them"
        if self.choices and value not in self.choices:
            return f"{self.flag} {shown(value)}: not one of {', '.join(self.choices)}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"{self.flag} {value}: not a finite number"
        if self.min is not None and value < self.min:
            return f"{self.flag} {value}: must be at least {self.min:g}"
        if self.max is not None and value > self.max:
            return f"{self.flag} {value}: must be at most {self.max:g}"
        return None


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def chosen(config: Any, names: Iterable[str]) -> list[str]:
    """Return those of `names` whose settings differ from their defaults."""
    return [name for name in names if getattr(config, name) != getattr(type(config), name)]


def shown(text: str) -> str:
    """A value as messages show it: unchanged if it is short and printable, otherwise quoted and cut."""
    return text if text and text.isprintable() and len(text) <= _SHOWN else _represented(text)


def _represented(value: Any) -> str:
    if isinstance(value, (list, tuple, set, dict)):  # may contain itself, or be too large to write
        return f"({type(value).__name__})"
    if isinstance(value, (str, bytes)) and len(value) > _SHOWN:
        return f"{value[:_SHOWN]!r}..."
    return repr(value)


def settings(cls: type) -> list[Setting]:
    """The settings of a dataclass, in the order of its fields; raises TypeError if a field cannot be an option."""
    hints = typing.get_type_hints(cls)
    result = []
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        if hints[field.name] not in _TYPES:
            expected = "an option is a str, int, float or bool (or one of these | None)"
            raise TypeError(f"{cls.__name__}.{field.name}: {expected}, not {hints[field.name]}")
        if field.default_factory is not dataclasses.MISSING:
            raise TypeError(f"{cls.__name__}.{field.name}: an option's default is a plain value, not a factory")
        limits = field.metadata.get(__name__, {})
        result.append(Setting(field.name, *_TYPES[hints[field.name]], field.default, **limits))
    return result


def problems(instance: Any) -> list[str]:
    """Return a line for each setting of a dataclass instance that breaks its type, choices or limits."""
    lines = (setting.problem(getattr(instance, setting.name)) for setting in settings(type(instance)))
    return [line for line in lines if line]
