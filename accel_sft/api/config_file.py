"""Reads a `--config` file: options by name in YAML, with every problem of the file reported at once. Needs no torch."""

import difflib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from accel_sft.api.config import REMOVED
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, Setting, flag_of, settings, shown
from accel_sft.api.other_names import OTHER_NAMES

TASK = "task"
"""The key that names the task, in a file that describes a whole run."""
_OFF = ("eval_every", "save_every", "resume")
"""Options that take the value `off`, which YAML 1.1 spells `no` and `false` too."""


def load_yaml(path: str, *classes: type, given: Collection[str] = ()) -> tuple[dict[str, Any], list[str]]:
    """Read a `--config` file. Its keys are option names with - or _; its values are read as on the command line.

    Args:
        classes: the dataclasses (trainer's, task's) whose fields may stand in the file.
        given: names of options that the command line has, which the file of a run need not: it has no secrets.
    Returns:
        The values by name (wrong values too, and a misspelt option's value under the nearest known name), and the
        problems, one line each: names given twice, unknown names with the nearest known one or the one that another
        trainer's name has here, unusable values.
    Raises:
        UserError: the file cannot be read, or is not a mapping in YAML.
    """
    setting_of = {setting.name: setting for cls in classes for setting in settings(cls)}
    values: dict[str, Any] = {}
    problems: list[str | None] = []
    first_lines: dict[str, int] = {}
    for key, node in _mapping(path):
        number = key.start_mark.line + 1
        line = f"line {number}"
        if key.id != "scalar":
            problems.append(f"{line}: expected an option's name before the colon")
            continue
        name = key.value.replace("-", "_")
        if name in first_lines:
            problems.append(f"{shown(name)} is given twice, on lines {first_lines[name]} and {number}; keep one")
        elif name in setting_of and _value(setting_of[name], node) == HIDDEN:
            lacking = f"{line}: {setting_of[name].flag}: secrets are not in a run's file; give it on the command line"
            problems.append(None if name in given else lacking)
        elif name in setting_of:
            values[name] = _value(setting_of[name], node)
            problem = setting_of[name].problem(values[name])
            problems.append(problem and f"{line}: {problem}")
        elif name == TASK:
            problems.append(None if _text(node) else f"{line}: task: expected a task's name")
        elif name in REMOVED and _text(node) == REMOVED[name]:
            pass  # the run.yaml of an earlier version
        elif ours := OTHER_NAMES.get(flag_of(name)):
            problems.append(f"{line}: unknown option {key.value!r}: {ours}")
        else:
            near = difflib.get_close_matches(name, [*setting_of, TASK], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            problems.append(f"{line}: unknown option {key.value[:80]!r}{hint}")
            values.update(
                {meant: _value(setting_of[meant], node) for meant in near if meant in setting_of.keys() - values}
            )
        first_lines.setdefault(name, number)
    return values, [f"--config {path}: {problem}" for problem in problems if problem]


def task_in(path: str) -> str | None:
    """Return the task that a `--config` file names, as it would stand on a command line; None if the file has no task.

    Raises:
        UserError: the file cannot be read, or is not a mapping in YAML.
    """
    return next((_text(node) for key, node in _mapping(path) if _text(key) == TASK), None)


def _mapping(path: str) -> list[tuple[Any, Any]]:
    """The nodes of a file's keys and values."""
    import yaml

    not_options = UserError(f"--config {path}: expected option names and values, one `name: value` a line")
    try:
        root = yaml.compose(Path(path).read_text(encoding="utf-8"), yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise UserError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise not_options from None
    if not isinstance(root, yaml.MappingNode):
        raise not_options
    return list(root.value)


def _text(node: Any) -> str | None:
    return node.value or None if node.id == "scalar" else None


def _value(setting: Setting, node: Any) -> Any:
    """The value of a YAML node for this setting; an empty collection, which no setting takes, for nested values."""
    parts = node.value if node.id == "sequence" else [node]
    if any(part.id != "scalar" for part in parts):
        return [] if node.id == "sequence" else {}
    if node.tag == "tag:yaml.org,2002:null":
        return None
    text = ",".join(part.value for part in parts)  # options that take several names separate them by commas
    return "off" if setting.name in _OFF and text.lower() in ("off", "no", "false") else setting.read(text)
