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
    """

    def __init__(self, watched: Callable[[str, bool], None] = lambda part, begins: None) -> None:
        self.parts: dict[str, float] = defaultdict(float)
        self._watched = watched
        self._within: list[float] = []  # seconds of the parts within each part that is running
        self._left = time.perf_counter()  # when the last outermost part ended

    def lap(self, name: str) -> dict[str, float]:
        """All parts since the last lap, in the order in which they ended; what came after them is `(before name)`."""
        now = time.perf_counter()
        self.parts[f"(before {name})"] += now - self._left
        done, self.parts, self._left = dict(self.parts), defaultdict(float), now
        return done

    def time(self, owner: Any, name: str, part: str) -> None:
        """Time every call of `owner.name` as `part`."""
        call = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
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
