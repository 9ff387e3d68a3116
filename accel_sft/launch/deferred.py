"""Puts off what libraries import for a function that a run here never calls, until it is called. No torch.

Each case is written down in docs/architecture.md, and holds for the versions that pyproject.toml allows.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def without_scipy() -> Iterator[None]:
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
