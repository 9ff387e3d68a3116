"""Hashes a task's code and options: cached tokens are used only while neither has changed.

The hash covers all files of the packages that the code is in and, if these import libraries, the versions of all
installed packages. If the code may depend on anything else, there is no fingerprint, and each start or resume reads all
rows or messages again.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import json
import pkgutil
import sys
import types
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_MAX_BYTES = 64 << 20
"""Maximum size of a package's files in bytes: reading more at each start would take longer than the hash saves."""
_INSTALLED = {"site-packages", "dist-packages"}
_OUTSIDE = """
    open FileIO system popen environ environb getenv exec eval importlib runpy pkgutil linecache subprocess socket
    urllib http sqlite3 dbm shelve ctypes fileinput configparser zipfile tarfile gzip bz2 lzma xml
    read_text read_bytes read_csv read_table read_json read_parquet load loadtxt genfromtxt fromfile memmap
    from_pretrained __import__ __builtins__ __file__ __loader__ __spec__ __path__
"""
"""Names and modules that give code access to files, environment, network, or code that it does not import."""


class _Unknown(Exception):
    """What the code does depends on something that is neither a plain value nor in a hashed file."""


def code_fingerprint(*values: Any) -> str | None:
    """Return a SHA-256 of all that decides how `values` (tasks, functions, plain values) behave; or None if unknown.

    The hash is the same in every process and on every machine with the same files and versions.
    """
    decides, libraries = _decides(*values)
    if decides is None:
        return None
    folders = [Path(folder) for folder in sys.path if libraries and Path(folder).name in _INSTALLED]
    installed = sorted({info.name for folder in folders for info in folder.glob("*.*-info")})
    return _digest([*decides, installed, sys.version_info[:3]])


def task_record(task: type) -> dict[str, Any]:
    """For a run's record: SHA-256 of the files of a task's own packages, and versions of the libraries they import.

    Unlike `code_fingerprint`, the hash does not depend on other packages. It is None if there is no fingerprint.
    """
    decides, libraries = _decides(task)
    return {"task_code": None if decides is None else _digest(decides), "task_libraries": libraries}


def _digest(decides: list[Any]) -> str:
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()


def _decides(*values: Any) -> tuple[list[Any] | None, dict[str, str]]:
    """Return what decides how `values` behave (None if unknown), and the libraries that their files import."""
    own = {"accel_sft"}
    imported: set[str] = set()
    try:
        described = [_described(value, own) for value in values]
        own -= sys.stdlib_module_names
        files = {top: _files(top, imported) for top in own}
        libraries = _libraries(imported - own - sys.stdlib_module_names)
    except (_Unknown, OSError, ImportError, SyntaxError, ValueError, AttributeError, RecursionError):
        return None, {}
    return [described, sorted(files.items())], libraries


def _described(value: Any, own: set[str]) -> Any:
    """Describe `value` in JSON, and add the top-level packages of the classes and functions in it to `own`."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str, bytes, type(Path())):
        return [kind.__name__, repr(value)]
    if kind in (list, tuple, set, frozenset, dict):
        parts = [_described(part, own) for part in (value.items() if kind is dict else value)]
        return [kind.__name__, sorted(parts, key=json.dumps) if kind in (set, frozenset) else parts]
    if kind is functools.partial:
        return ["partial", _described([value.func, value.args, value.keywords], own)]
    if kind is types.MethodType and getattr(value.__self__, value.__name__, None) == value:
        return ["method", value.__name__, _described(value.__self__, own)]
    if isinstance(value, (type, types.FunctionType)):
        for part in value.__mro__ if isinstance(value, type) else (value,):
            resolved = pkgutil.resolve_name(f"{part.__module__}:{part.__qualname__}")
            if resolved is not part or part.__module__ == "__main__":  # shadowed, or defined in a script or at a prompt
                raise _Unknown
            own.add(part.__module__.partition(".")[0])
        return ["name", value.__module__, value.__qualname__]
    if not dataclasses.is_dataclass(value):
        raise _Unknown
    computed = {name for cls in kind.__mro__ for name, v in vars(cls).items() if type(v) is functools.cached_property}
    fields = {name: part for name, part in getattr(value, "__dict__", {}).items() if name not in computed}
    fields |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return ["object", _described(kind, own), _described(fields, own)]


def _places(top: str) -> list[Path]:
    """The file of a top-level module, or the folders of a package."""
    spec = sys.modules[top].__spec__ if top in sys.modules else importlib.util.find_spec(top)
    if spec is None or not (spec.submodule_search_locations or spec.has_location):
        raise _Unknown
    return [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]]


def _files(top: str, imported: set[str]) -> str:
    """Return a SHA-256 of all files of a package (data too), and add its imported top-level modules to `imported`."""
    digest, total = hashlib.sha256(), 0
    pattern = "*.py" if top == "accel_sft" else "*"  # launch files do not decide what a task does
    for place in _places(top):
        for file in sorted(place.rglob(pattern)) if place.is_dir() else [place]:
            if "__pycache__" in file.parts or (file.is_dir() and not file.is_symlink()):
                continue
            total += file.stat().st_size
            if total > _MAX_BYTES or not file.is_file() or file.suffix in (".so", ".pyd", ".pyc"):
                raise _Unknown
            content = file.read_bytes()
            digest.update(json.dumps([str(file.relative_to(place.parent)), len(content)]).encode() + content)
            if file.suffix == ".py" and top != "accel_sft":
                imported |= _imported(content)
    return digest.hexdigest()


def _imported(source: bytes) -> set[str]:
    used, imported = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Name, ast.Attribute)):
            used.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used |= {alias.name for alias in node.names}
            imported |= {node.module.partition(".")[0]} if node.module and not node.level else set()
    if not (used | imported).isdisjoint(_OUTSIDE.split()):
        raise _Unknown
    return imported


def _libraries(imported: set[str]) -> dict[str, str]:
    """Return the distributions of the imported modules, with versions."""
    provided, versions = _distributions() if imported else {}, dict[str, str]()
    for top in imported:  # a module beside the task, or installed from a folder, may change and keep its version
        distributions = [metadata.distribution(name) for name in provided.get(top, ())]
        places = [place for place in _places(top) if _INSTALLED.isdisjoint(place.parts)]
        if places or not distributions or any(d.read_text("direct_url.json") for d in distributions):
            raise _Unknown
        versions |= {d.name: d.version for d in distributions}
    return dict(sorted(versions.items()))


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """The distributions of each top-level module, read once, because reading takes a fraction of a second."""
    return metadata.packages_distributions()
