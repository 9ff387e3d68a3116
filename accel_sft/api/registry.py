"""Finds tasks in the entry point group `accel_sft.tasks`, and loads them by name. A broken task affects no other."""

import contextlib
import dataclasses
import difflib
import importlib.metadata
import re
import sys
from collections.abc import Iterable
from typing import Any

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task, contract_faults
from accel_sft.api.task_file import load_file, task_file

GROUP = "accel_sft.tasks"
SHIPPED = {"chat": "accel-sft-chat", "math": "accel-sft-math", "ner": "accel-sft-ner"}
"""Reserved task names, each with the only distribution that may use it."""
RESERVED = frozenset(
    {"check", "compare", "completion", "doctor", "evaluate", "export-data", "generate", "how-much", "launch-file"}
    | {"merge", "new-task", "parity", "plan", "push", "rehearse", "report", "sample", "serve", "tasks", "verify"}
)
"""Names of the tools, which no task may have."""


@dataclasses.dataclass(frozen=True)
class Plugin:
    """One entry point from a distribution's metadata; `fault` says why it cannot be used, and is empty if it can."""

    name: str
    target: str
    distribution: str
    version: str
    summary: str
    fault: str = ""

    def error(self, cause: str) -> UserError:
        """Return an error whose one line has task, entry point, distribution, version and the cause."""
        cause = " ".join(cause.split())
        return UserError(f"task {self.name!r} ({self.target}, {self.distribution} {self.version}): {cause}")


def plugins() -> list[Plugin]:
    """Return all entry points of the group, sorted by name, with the faults that metadata shows; import none."""
    every = []
    for point in importlib.metadata.entry_points(group=GROUP):
        assert point.dist  # never None, because `entry_points` reads the metadata of distributions
        name = re.sub(r"[-_.]+", "-", point.dist.name).lower()
        every.append(Plugin(point.name, point.value, name, point.dist.version, point.dist.metadata["Summary"] or ""))
    every.sort(key=lambda plugin: (plugin.name, plugin.distribution, plugin.target))
    return [dataclasses.replace(plugin, fault=_fault(plugin, every)) for plugin in every]


def names() -> dict[str, str]:
    """Return name and one-line summary of each task whose metadata shows no fault, without importing a plugin."""
    return {plugin.name: plugin.summary for plugin in plugins() if not plugin.fault}


def load(name: str) -> type[Task]:
    """Import the installed task `name`, or the task in the file `name`, and check it against the contract."""
    if file := task_file(name):
        return load_file(*file)
    candidates = [plugin for plugin in plugins() if plugin.name == name]
    if usable := [plugin for plugin in candidates if not plugin.fault]:
        return load_plugin(usable[0])
    if candidates:
        raise UserError(*(str(plugin.error(plugin.fault)) for plugin in candidates))
    raise UserError(f"no task {name!r}{suggestion(name, names())}; `accel-sft tasks` lists the installed tasks")


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return a text such as `; did you mean math?`, or "" if no known name is similar."""
    near = difflib.get_close_matches(name, sorted(choices), n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def summary_of(cls: type, fallback: str) -> str:
    """Return the first line of a class's docstring, or `fallback` if `dataclass` generated that docstring."""
    doc = (vars(cls).get("__doc__") or "").strip()
    return fallback if not doc or re.match(rf"{cls.__name__}\(", doc) else doc.splitlines()[0]


def load_plugin(plugin: Plugin) -> type[Task]:
    """Import and check one plugin; a UserError has task, entry point, distribution, version and cause in one line."""
    if plugin.fault:
        raise plugin.error(plugin.fault)
    entry_point = importlib.metadata.EntryPoint(plugin.name, plugin.target, GROUP)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a command may print JSON to the standard output
            cls: type[Task] = entry_point.load()
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything when imported
        raise plugin.error(f"cannot be imported: {what_and_where(error)}") from error
    if causes := contract_faults(cls):
        raise plugin.error("; ".join(causes))
    return cls


def build(name: str, cls: type[Any], values: dict[str, Any]) -> Any:
    """Return a task, or the trainer's settings, made from `values`; a UserError has all problems, one per line."""
    try:
        built = cls(**values)
        lines = list(built.problems())
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"task {name!r} fails on its options: {what_and_where(error)}") from error
    if lines:
        raise UserError(*lines)
    return built


def _fault(plugin: Plugin, every: list[Plugin]) -> str:
    """Return the reason, visible in metadata, why a plugin cannot be used; empty if there is none."""
    if not re.fullmatch("[a-z0-9-]+", plugin.name):
        return "invalid task name; use lower-case letters, digits and hyphens"
    if plugin.name in RESERVED:
        return f"the name belongs to the tool `accel-sft {plugin.name}`; the plugin must choose another name"
    if owner := SHIPPED.get(plugin.name):
        return "" if plugin.distribution == owner else f"the name belongs to {owner}; choose another name"
    same = [other for other in every if other.name == plugin.name and other is not plugin]
    if same:
        others = ", ".join(f"{other.target} of {other.distribution} {other.version}" for other in same)
        return f"the name is also used by {others}; none of them is loaded, uninstall all but one"
    return ""
