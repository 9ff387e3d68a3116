"""Whether a task or a function would do today what it did before: its values and the source of all code it can reach.

Standard library only.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

_MOST_BYTES = 64 << 20
"""Of one package's files: reading more on every start would take longer than what it is to save."""


_UNTOLD = {"open", "read_text", "read_bytes", "__file__", "environ", "getenv", "import_module", "__import__"}
_UNTOLD |= {"exec", "eval", "urlopen", "files", "run", "Popen", "check_output"}
"""Names by which a source may reach what its imports do not tell."""


class _Doubt(Exception):
    """Something decides that neither a name, nor a plain value, nor a source file tells."""


def identity(*values: Any) -> str | None:
    """SHA-256 over what decides how `values` behave, the same on every machine; None where that cannot be told.

    Tasks and other dataclasses count by class and values, functions and classes by name, each with the files of its
    package and of all modules these import, except the standard library's; installed packages count by version.
    """
    names: set[str] = set()
    try:
        told = [[_told(value, names) for value in values], _sources(names), sys.version_info[:2]]
    except (_Doubt, OSError, RecursionError):
        return None
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _told(value: Any, names: set[str]) -> Any:
    """`value` as JSON can hold it; the top-level modules of the code in it are added to `names`."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return [type(value).__name__, repr(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_told(part, names) for part in value]]
    if type(value) in (set, frozenset):
        return [type(value).__name__, sorted(json.dumps(_told(part, names)) for part in value)]
    if type(value) is dict:
        return ["dict", [[_told(key, names), _told(part, names)] for key, part in value.items()]]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, functools.partial):
        return ["partial", _told([value.func, value.args, value.keywords], names)]
    if isinstance(value, types.MethodType):
        if getattr(value.__self__, value.__name__, None) != value:
            raise _Doubt
        return ["method", value.__name__, _told(value.__self__, names)]
    if isinstance(value, (type, types.FunctionType)):
        return ["name", *_named(value, names)]
    if dataclasses.is_dataclass(value):
        parts = {key: part for key, part in getattr(value, "__dict__", {}).items() if not _computed(value, key)}
        parts |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return ["object", *_named(type(value), names), _told(parts, names)]
    raise _Doubt


def _computed(value: Any, key: str) -> bool:
    """Whether an attribute is the kept result of a cached property."""
    return any(isinstance(vars(cls).get(key), functools.cached_property) for cls in type(value).__mro__)


def _named(value: Any, names: set[str]) -> list[str]:
    """Module and name under which anyone would find this very class or function, and every class it inherits from."""
    for each in value.__mro__[:-1] if isinstance(value, type) else (value,):
        found: Any = sys.modules.get(each.__module__)
        for part in each.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is not each:  # made in a function, or replaced: another one may bear this name tomorrow
            raise _Doubt
        names.add(each.__module__.partition(".")[0])
    return [value.__module__, value.__qualname__]


def _sources(names: set[str]) -> dict[str, str]:
    """For each package in `names`, and each that these import, what tells one version of it from another."""
    found: dict[str, str] = {}
    waiting = set(names)
    while waiting:
        name = waiting.pop()
        if name in found or name in sys.stdlib_module_names:
            continue
        places = _places(name)
        installed = any({"site-packages", "dist-packages"} & set(place.parts) for place in places)
        if not places or (installed and name not in names):
            found[name] = _version(name, places)
            continue
        digest = hashlib.sha256()
        for file in _files(places):
            content = file.read_bytes()
            digest.update(json.dumps([file.name, len(content)]).encode() + content)
            if file.suffix == ".py" and name != "accel_sft":
                waiting |= _imported(content)
        found[name] = digest.hexdigest()
    return found


def _places(name: str) -> list[Path]:
    """The file of a top-level module, or the folders of a package; none: it is not installed, or written in C."""
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None)
    if module is None:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return []
    if spec is not None and spec.submodule_search_locations:
        return [Path(folder) for folder in spec.submodule_search_locations]
    file = getattr(module, "__file__", None) or (spec.origin if spec is not None and spec.has_location else None)
    if file is None and name == "__main__":  # typed in, not written down
        raise _Doubt
    return [Path(file)] if file else []


def _files(places: list[Path]) -> list[Path]:
    """All files of a package, its data too; not what Python or an editor keeps beside them."""
    files = []
    for place in places:
        if place.is_file():
            files.append(place)
            continue
        for folder, subfolders, names in os.walk(place):
            subfolders[:] = sorted(name for name in subfolders if name != "__pycache__" and not name.startswith("."))
            files += [Path(folder, name) for name in sorted(names) if not name.startswith(".")]
    if sum(file.stat().st_size for file in files) > _MOST_BYTES:
        raise _Doubt
    return files


def _imported(source: bytes) -> set[str]:
    """Top-level names of the modules that a source imports, anywhere in it.

    Raises:
        _Doubt: it reaches for what no import names: files, the environment, code by name.
    """
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError):
        raise _Doubt from None
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    if used & _UNTOLD:
        raise _Doubt
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    others = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level and node.module}
    return {name.partition(".")[0] for name in plain | others}


def _version(name: str, places: list[Path]) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # the distribution has another name than the package
        start = [place if place.is_file() else place / "__init__.py" for place in places]
        return hashlib.sha256(b"".join(file.read_bytes() for file in start if file.is_file())).hexdigest()
