"""Times the parts of a program where the program calls them. Uses the standard library only."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any


class Clock:
    """Counts each part's own seconds, without those of parts called within it, so that all parts add up to the total.

    The time between two outermost parts is a part too, named after the second one, as in "(before backward)".

    Args:
        watched: called with a part's name when it begins (True) and when it ends (False).

    Attributes:
        uncalled: parts that have not been called yet; the program may no longer make these calls.
    """

    def __init__(self, watched: Callable[[str, bool], None] = lambda part, begins: None) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self.uncalled: set[str] = set()
        self._watched = watched
        self._within: list[float] = []  # seconds of the parts within each part that is running
        self._left = time.perf_counter()  # when the last outermost part ended

    def lap(self, name: str) -> dict[str, float]:
        """The seconds of all parts since the last lap, in the order in which they first counted.

        The time after the last of them is `(before name)`.
        """
        now = time.perf_counter()
        self.parts[f"(before {name})"] += now - self._left
        done, self.parts, self._left = dict(self.parts), defaultdict(float), now
        return done

    def time(self, owner: Any, call: Callable, part: str) -> None:
        """Time every call of `owner`'s attribute `call` as `part`.

        Args:
            call: the function itself, not its name, so that a renamed function is noticed by the caller.
        Raises:
            LookupError: `call` is no attribute of `owner` itself; name the module or class that the program uses.
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
