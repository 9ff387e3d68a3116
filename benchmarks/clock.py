"""How long the parts of a program take, timed where the program calls them. Standard library only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Clock:
    """Seconds of each part, a part's own without those of parts within it, so that all add up to the whole.

    What lies between two outermost parts is a part too, called after the second one, as in "(before backward)".

    Args:
        watched: called with a part's name and whether it begins or ends.

    Attributes:
        uncalled: parts of which nothing has been called yet: the program may have other calls by now.
    """

    def __init__(self, watched: Callable[[str, bool], None] = lambda part, begins: None) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.uncalled: set[str] = set()
        self._watched = watched
        self._within: list[float] = []  # seconds of the parts within each part that is running
        self._left = time.perf_counter()  # when the last outermost part ended

    def lap(self, name: str) -> dict[str, float]:
        """All parts since the last lap, in the order in which they ended; what came after them is `(before name)`."""
        now = time.perf_counter()
        self.parts[f"(before {name})"] += now - self._left
        done, self.parts, self._left = dict(self.parts), defaultdict(float), now
        return done

    def time(self, owner: Any, call: Callable, part: str) -> None:
        """Time every call of `call` as `part`, where it is an attribute of `owner`.

        Args:
            call: itself rather than its name, so that a renamed one is noticed where it is given.
        Raises:
            LookupError: it is no attribute of `owner` itself; name the module or class that the program finds it in.
        """
        name = next((name for name in vars(owner) if getattr(owner, name) is call), None)
        if name is None:
            raise LookupError(f"{owner}: {call} is not among its own attributes, so {part!r} cannot be timed there")
        self.uncalled.add(part)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self.uncalled.discard(part)
            self._watched(part, True)
            started = time.perf_counter()
            if not self._within:
                self.parts[f"(before {part})"] += started - self._left
            self._within.append(0.0)
            try:
                return call(*args, **kwargs)
            finally:
                ended = time.perf_counter()
                self.parts[part] += ended - started - self._within.pop()
                if self._within:
                    self._within[-1] += ended - started
                else:
                    self._left = ended
                self._watched(part, False)

        setattr(owner, name, timed)
