"""Where the time of a run's steps went, by what the training process did. No torch."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

BATCHES, FORWARD, BACKWARD, COMMUNICATION, OPTIMIZER, PAUSE = (
    "make batch",
    "forward",
    "backward",
    "wait for ranks",
    "optimizer step",
    "evaluate or save",
)
"""What the training process does, by the names of its spans in a trace."""
_WORDS = {BATCHES: "reading rows and making batches", COMMUNICATION: "exchanging the loss", OPTIMIZER: "optimizer"}
_REST = "the rest"


class TimeSpent:
    """Adds up what the steps of this start took, evaluations and checkpoints aside."""

    def __init__(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._parts: defaultdict[str, float] = defaultdict(float)

    def add(self, step_seconds: float, spans: Mapping[str, float]) -> None:
        """Count a step, and the seconds of it in each span."""
        self._steps += 1
        self._seconds += step_seconds
        for name, seconds in spans.items():
            if name != PAUSE:
                self._parts[name] += seconds

    def found(self) -> dict[str, Any] | None:
        """`steps`, their `seconds`, and these divided into `parts` by what the process did; None before a step."""
        if not self._seconds:
            return None
        rest = max(self._seconds - sum(self._parts.values()), 0.0)
        return {"steps": self._steps, "seconds": self._seconds, "parts": {**self._parts, _REST: rest}}


def time_sentence(spent: Mapping[str, Any]) -> str:
    """What `TimeSpent` found in a sentence."""
    parts, total = spent["parts"], sum(spent["parts"].values())
    largest = sorted(((part / total, name) for name, part in parts.items() if part > total / 200), reverse=True)
    told = ", ".join(f"{share:.0%} {_WORDS.get(name, name)}" for share, name in largest)
    return f"a step took {spent['seconds'] / spent['steps']:.3g} s in the mean of {spent['steps']:,}: {told}"
