"""A `--config` file: option names and values in YAML, read no further than an option's value can go. No torch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accel_sft.api.errors import UserError
from accel_sft.api.options import Setting, settings, shown

if TYPE_CHECKING:
    import yaml

_MAX_DEPTH = 20
"""PyYAML calls itself for each level; an option's value has none or one."""
_LONGEST_NAME = 40


def load_yaml(path: str, *classes: type) -> dict[str, Any]:
    """Settings from a `--config` file, keys being option names with - or _.

    Args:
        classes: the dataclasses (trainer's, task's) whose fields may stand in the file.
    Raises:
        UserError: unreadable file, or all of: keys given twice, unknown keys with the nearest known name, wrong types.
    """
    import difflib

    import yaml

    not_options = f"--config {path}: expected option names and values, one `name: value` a line"
    try:
        text = Path(path).read_text(encoding="utf-8")
        if _nested_too_deeply(text):
            raise UserError(not_options)
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(root, yaml.MappingNode):
        raise UserError(not_options)
    known = {setting.name: setting for cls in classes for setting in settings(cls)}
    values, wrong = {}, _given_twice(root)
    for key, node in root.value:
        if not isinstance(key, yaml.ScalarNode):
            wrong.append(f"line {_line(key)}: expected an option's name before the colon")
            continue
        name = key.value.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            told = repr(key.value) if len(key.value) <= _LONGEST_NAME else f"{key.value[:_LONGEST_NAME]!r}..."
            wrong.append(f"unknown option {told}" + (f"; did you mean {near[0]}?" if near else ""))
            continue
        try:
            value = _as(known[name], _plain(loader, node))
        except ValueError as error:
            wrong.append(f"{known[name].flag}: {error}")
            continue
        problem = known[name].problem(value)
        if problem:
            wrong.append(problem)
        values[name] = value
    if wrong:
        raise UserError(*(f"--config {path}: {line}" for line in wrong))
    return values


def _given_twice(root: yaml.MappingNode) -> list[str]:
    """One line for each option name that stands twice in a file, of which YAML keeps the last without a word."""
    lines: dict[str, list[int]] = {}
    for key, _ in root.value:
        if isinstance(key.value, str):
            lines.setdefault(key.value.replace("-", "_"), []).append(_line(key))
    return [
        f"{shown(name)} is given {len(at)} times, on lines {' and '.join(map(str, at))}; keep one"
        for name, at in lines.items()
        if len(at) > 1
    ]


def _nested_too_deeply(text: str) -> bool:
    import yaml

    depth = 0
    for event in yaml.parse(text, yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            return True
    return False


def _plain(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    """The value of a node that is a scalar or a list of scalars, which is all that an option can be.

    Raises:
        ValueError: it is neither, or its text is not what YAML takes it for.
    """
    import yaml

    if isinstance(node, yaml.MappingNode):
        raise ValueError(f"expected one value, got names and values (line {_line(node)})")
    if isinstance(node, yaml.SequenceNode):
        if not all(isinstance(part, yaml.ScalarNode) for part in node.value):
            raise ValueError(f"expected one value, got a list with more in it than values (line {_line(node)})")
        return [_plain(loader, part) for part in node.value]
    try:
        return loader.construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):  # each tag has its own way to fail
        kind = node.tag.rpartition(":")[2]
        raise ValueError(
            f"{shown(node.value)} cannot be read as YAML's {shown(kind)} (line {_line(node)}); quote it if it is text"
        ) from None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _as(setting: Setting, value: Any) -> Any:
    """What YAML reads otherwise than an option means it; the rest is left for `Setting.problem`."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(value, int) and value.bit_length() > 63:
        return value
    if isinstance(value, str) and setting.type is float:  # YAML 1.1 reads 1e-4 as text
        with contextlib.suppress(ValueError):
            return float(value)
    elif setting.type is str and number:
        return json.dumps(value)
    elif setting.type is str and isinstance(value, list) and all(isinstance(part, str) for part in value):
        return ",".join(value)  # options that take several names take them with commas between
    elif setting.name in ("eval_every", "save_every", "resume") and value is False:  # YAML 1.1 reads off as false
        return "off"
    elif setting.type is float and number:
        return float(value)
    return value
