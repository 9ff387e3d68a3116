"""Loads a task's class from a single Python file instead of a package. Needs only the standard library."""

import contextlib
import hashlib
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError, what_and_where
from accel_sft.api.task import Task, contract_faults

_MODULE = "accel_sft_file_"
"""Prefix of a task file's module name, so that a file `math.py` does not replace Python's own `math`."""


def task_file(word: str) -> tuple[Path, str] | None:
    """The file and the class in a word such as mytask.py:MyTask ("" without a class); None for an installed task."""
    match = re.fullmatch(r"(.+\.py)(?::(\w*))?", word, re.DOTALL)
    return (Path(match[1]).expanduser(), match[2] or "") if match else None


def recorded_name(word: str) -> str:
    """A task's name in a run's record: the name of its file, without folder and class, or of the installed task."""
    file = task_file(word)
    return file[0].name if file else word


def same_task(word: str, other: str) -> bool:
    """Whether two words name the same task: equal names, or the same file (either word may leave out the class)."""
    first, second = task_file(word), task_file(other)
    if first is None or second is None:
        return word == other
    return first[0].resolve() == second[0].resolve() and len({first[1], second[1]} - {""}) < 2


def load_file(path: Path, class_name: str) -> type[Task]:
    """Run a Python file; check and return the class of its task. The file can import modules of its folder by name."""
    where = f"task {path}"
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UserError(f"{where}: cannot be read ({error.strerror}); name a Python file with a task") from None
    module = _module(path.absolute(), source)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a command may print JSON to the standard output
            exec(compile(source, str(path), "exec"), module.__dict__)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # the file may raise anything
        raise UserError(f"{where}: cannot be imported: {' '.join(what_and_where(error).split())}") from error
    cls: type[Task] = _chosen(where, path, class_name, module)
    if causes := contract_faults(cls):
        raise UserError(f"{where}: {' '.join('; '.join(causes).split())}")
    return cls


def file_record(cls: type) -> dict[str, str] | None:
    """Path, class and content hash of the file that a task was loaded from; None for an installed task."""
    loaded = getattr(sys.modules.get(cls.__module__), "__task_file__", None)
    return {**loaded, "class": cls.__qualname__} if loaded else None


def _module(path: Path, source: bytes) -> types.ModuleType:
    name = _MODULE + re.sub(r"\W", "_", path.stem)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec  # not None, because the name ends with .py
    module = importlib.util.module_from_spec(spec)
    module.__dict__["__task_file__"] = {"path": str(path), "sha256": hashlib.sha256(source).hexdigest()}
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a `random.py` there does not hide Python's
    return module


def _chosen(where: str, path: Path, class_name: str, module: types.ModuleType) -> Any:
    own = [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    tasks = {cls.__name__: cls for cls in own if issubclass(cls, Task)}
    if class_name:
        if not hasattr(module, class_name):
            raise UserError(f"{where}: no class {class_name} in this file; it has {', '.join(tasks) or 'no task'}")
        return getattr(module, class_name)
    usable = {name: cls for name, cls in tasks.items() if not cls.__abstractmethods__} or tasks
    if not usable:
        raise UserError(f"{where}: no subclass of accel_sft.Task in this file; write one, or name it: {path}:MyTask")
    if len(usable) > 1:
        choices = " or ".join(f"{path}:{name}" for name in usable)
        raise UserError(f"{where}: this file has {len(usable)} tasks; name one: {choices}")
    return next(iter(usable.values()))
