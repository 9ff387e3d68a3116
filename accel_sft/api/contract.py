"""Checks whether a class can be used as a task: methods, signatures, options. Needs only the standard library."""

import dataclasses
import inspect
import re
from typing import Any

from accel_sft.api.options import settings
from accel_sft.api.task import Task
from accel_sft.api.tool_configs import EvaluateConfig

_METHODS = {
    name: tuple(inspect.signature(method).parameters)
    for name, method in vars(Task).items()
    if inspect.isfunction(method) and not name.startswith("_")
}
"""The names and parameters, `self` included, of the methods that the trainer calls."""


def contract_faults(cls: Any) -> list[str]:
    """Return why a class cannot be used as a task, one phrase for each reason; an empty list if it can."""
    if not isinstance(cls, type) or not issubclass(cls, Task) or cls is Task:
        return [f"{getattr(cls, '__qualname__', repr(cls))} is not a subclass of accel_sft.Task"]
    causes = []
    if "__dataclass_fields__" not in vars(cls) or not all(f.kw_only for f in dataclasses.fields(cls) if f.init):
        causes.append(f"{cls.__name__} is not a keyword-only dataclass; write @dataclass(kw_only=True) above it")
    if missing := sorted(cls.__abstractmethods__):
        causes.append(f"{cls.__name__} lacks {', '.join(missing)}")
    causes += [fault for name in _METHODS if name not in missing and (fault := _signature_fault(cls, name))]
    fields = {field.name for field in dataclasses.fields(cls)}
    for name, kind in (("main_metric", str), ("higher_is_better", bool)):
        if name in fields:
            causes.append(f"{name} has a type annotation, which makes it an option; remove the annotation")
        elif not isinstance(getattr(cls, name, None), kind) or getattr(cls, name) == "":
            causes.append(f"{name} is missing, empty or not a {kind.__name__}")
    return causes + _option_faults(cls)


def _signature_fault(cls: type[Task], name: str) -> str:
    method, bound = inspect.getattr_static(cls, name), getattr(cls, name)
    expected = f"{name}({', '.join(_METHODS[name])})"
    if not callable(bound) or isinstance(method, property):
        return f"{name} is not a method; expected {expected}"
    bound_already = isinstance(method, (staticmethod, classmethod))
    try:
        signature = inspect.signature(bound)
    except ValueError:  # a callable written in C has no signature
        return ""
    try:
        signature.bind(*_METHODS[name][1 if bound_already else 0 :])
    except TypeError as error:
        return f"{name}{signature} does not accept the trainer's call {expected}: {error}"
    return ""


def _flags(setting: Any) -> set[str]:
    return {setting.flag, "--no-" + setting.flag[2:]} if setting.type is bool else {setting.flag}


def _option_faults(cls: type[Task]) -> list[str]:
    try:
        own = settings(cls)
    except (TypeError, NameError) as error:
        return [str(error)]
    taken = {"--help", "--help-all", "--config", "--version", "--task"}.union(*map(_flags, settings(EvaluateConfig)))
    causes = []
    for setting in own:
        if not re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]|[a-z]", setting.name):
            causes.append(
                f"{setting.name!r} cannot be an option's name; use lower-case letters, digits and _, with a letter "
                "first and no _ last"
            )
        clash = sorted(_flags(setting) & taken)
        if clash:
            causes.append(f"{' and '.join(clash)}: the trainer or the task has this option; rename {setting.name!r}")
        elif not setting.required and setting.problem(setting.default):
            causes.append(f"default of {setting.problem(setting.default)}")
        taken |= _flags(setting)
    return causes
