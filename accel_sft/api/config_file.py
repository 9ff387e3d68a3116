"""Reads a `--config` file: options by name in YAML, with every problem of the file reported at once. No torch."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_sft.api.errors import UserError
from accel_sft.api.options import Setting, settings, shown

if TYPE_CHECKING:
    import yaml

_OFF = ("eval_every", "save_every", "resume")
"""Options with the value `off`, which YAML 1.1 reads as false."""


class BadOptions(UserError):
    """A file of which some options cannot be used.

    Attributes:
        usable: the values that are right, a misspelt option's under the name that was meant.
        wrong: names of the options whose values are wrong.
    """

    def __init__(self, problems: list[str], usable: dict[str, Any], wrong: set[str]) -> None:
        super().__init__(*problems)
        self.usable, self.wrong = usable, wrong


def load_yaml(path: str, *classes: type) -> dict[str, Any]:
    """Settings from a `--config` file, keys being option names with - or _.

    Args:
        classes: the dataclasses (trainer's, task's) whose fields may stand in the file.
    Raises:
        BadOptions: keys given twice, unknown keys with the nearest known name, values of a wrong type, all together.
        UserError: the file cannot be read, or is not a mapping in YAML.
    """
    import difflib

    import yaml

    not_options = UserError(f"--config {path}: expected option names and values, one `name: value` a line")
    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8"))
        root = loader.get_single_node()
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise not_options from None
    if not isinstance(root, yaml.MappingNode):
        raise not_options
    known = {setting.name: setting for cls in classes for setting in settings(cls)}
    usable, wrong, problems = {}, set(), []
    first_lines: dict[str, int] = {}
    for key, node in root.value:
        if not isinstance(key, yaml.ScalarNode):
            problems.append(f"line {_line(key)}: expected an option's name before the colon")
            continue
        name = key.value.replace("-", "_")
        if name in first_lines:
            problems.append(f"{shown(name)} is given twice, on lines {first_lines[name]} and {_line(key)}; keep one")
            continue
        first_lines[name] = _line(key)
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            problems.append(f"unknown option {key.value[:80]!r}" + (f"; did you mean {near[0]}?" if near else ""))
            with contextlib.suppress(IndexError, ValueError):
                usable.setdefault(near[0], _value(loader, known[near[0]], node))
        else:
            try:
                usable[name] = _value(loader, known[name], node)
            except ValueError as error:
                wrong.add(name)
                problems.append(str(error))
    if problems:
        raise BadOptions([f"--config {path}: {line}" for line in problems], usable, wrong)
    return usable


def _value(loader: yaml.SafeLoader, setting: Setting, node: yaml.Node) -> Any:
    """What a node means as this setting.

    Raises:
        ValueError: it cannot be this setting's value, or its text is not what YAML takes it for.
    """
    import yaml

    parts = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not all(isinstance(part, yaml.ScalarNode) for part in parts):
        raise ValueError(f"{setting.flag}: expected one value or a list of values, got more (line {_line(node)})")
    values = [_scalar(loader, setting, part) for part in parts]
    if isinstance(node, yaml.ScalarNode):
        value = values[0]
    else:  # options that take several names take them with commas between
        is_names = setting.type is str and all(isinstance(part, str) for part in values)
        value = ",".join(values) if is_names else values
    if problem := setting.problem(value):
        raise ValueError(problem)
    return value


def _scalar(loader: yaml.SafeLoader, setting: Setting, node: yaml.ScalarNode) -> Any:
    import yaml

    try:
        value = loader.construct_object(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # each tag has its own way to fail
        kind = shown(node.tag.rpartition(":")[2])
        why = f"cannot be read as YAML's {kind} (line {_line(node)}); quote it if it is text"
        raise ValueError(f"{setting.flag}: {shown(node.value)} {why}") from None
    if setting.name in _OFF and value is False:
        return "off"
    if setting.type is str and isinstance(value, (int, float)):
        return node.value  # as it was written, which an unquoted `8`, `1e4` or `no` as text means
    if setting.type is float and isinstance(value, (int, str)) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)  # YAML 1.1 reads 1e-4 as text
    return value


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1
