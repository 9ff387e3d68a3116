"""Puts off what libraries import for a function that a run here never calls, until it is called. No torch.

Beside that, a list that transformers makes twice is made once. Each case is written down in docs/architecture.md, and
holds for the versions that pyproject.toml allows.
"""

import contextlib
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def lighter_transformers() -> Iterator[None]:
    """Inside, transformers is imported without work that no run here needs; it takes a second longer otherwise."""
    with _without_scipy():
        _list_models_once()
        yield


def _list_models_once() -> None:
    """Have transformers read the files of its models once, for the names in them.

    As of 5.23 it does so for `transformers`, and again, for a quarter of a second, for `transformers.models`: it keeps
    what it found by the argument, which is the folder first and then a file in it.
    """
    names: Any = importlib.import_module("transformers.utils.import_utils")
    read = names.create_import_structure_from_path
    if hasattr(read, "cache_info"):  # else there is nothing kept that could be found

        def read_folder(path: Any) -> Any:
            return read(Path(path).parent if Path(path).is_file() else path)

        names.create_import_structure_from_path = read_folder


@contextlib.contextmanager
def _without_scipy() -> Iterator[None]:
    """Inside, transformers is imported without `scipy.optimize`, which takes a third of a second.

    As of 5.23 its losses for detecting objects take `linear_sum_assignment` from there, and every model imports all
    losses. They get a function that imports the real one when it is called; for any other name, and for imports
    outside, `scipy.optimize` is the real module.
    """
    name = "scipy.optimize"
    if name in sys.modules:
        yield
        return
    stand_in: Any = ModuleType(name)

    def real(attribute: str) -> Any:
        if attribute.startswith("__"):  # the import statement asks for __path__
            raise AttributeError(attribute)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    stand_in.__getattr__ = real
    stand_in.linear_sum_assignment = lambda *args, **kwargs: real("linear_sum_assignment")(*args, **kwargs)
    sys.modules[name] = stand_in
    try:
        yield
    finally:
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]


def deepspeed_where_it_trains() -> None:
    """Have accelerate look for DeepSpeed's engine around a model only where DeepSpeed was imported, as for a launch by
    it.

    accelerate 1.15 imports DeepSpeed, for a quarter of a second, whenever a model is unwrapped, and transformers
    unwraps each model that it saves.
    """
    other: Any = importlib.import_module("accelerate.utils.other")
    if hasattr(other, "is_deepspeed_available"):
        other.is_deepspeed_available = lambda: sys.modules.get("deepspeed") is not None


def compile_muon_later() -> None:
    """Have DeepSpeed's Muon load torch's compiler when it first takes a step, not for every optimizer.

    DeepSpeed 0.19 imports its Muon to see whether an optimizer is one, and its functions are decorated with
    `torch.compile`.
    """
    from deepspeed.runtime import compiler

    compiler.compile = lambda: _compiled_when_called


def _compiled_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    import torch

    compiled = functools.cache(lambda: torch.compile(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # within another compiled function it becomes a part of that
        return (function if torch.compiler.is_compiling() else compiled())(*args, **kwargs)

    return call
