"""What a run knows of itself besides its weights; a checkpoint holds it. Standard library only."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass
class Progress:
    """Counters and judgements up to `step` steps done.

    Attributes:
        seconds: spent in steps; evaluations and checkpoints are left out.
        tokens: real tokens learnt from, prompts included.
        before, latest: the first and the newest evaluation's metrics.
        evaluated_step: the step of the newest evaluation, -1 before there is one.
        best, best_step: the best main metric so far and where it was.
        without_better: evaluations since then.
    """

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    before: dict[str, float] | None = None
    latest: dict[str, float] | None = None
    evaluated_step: int = -1
    best: float | None = None
    best_step: int | None = None
    without_better: int = 0

    def counted(self, *, tokens: int, seconds: float, **numbers: float) -> dict[str, float]:
        """Count a step that was just done; its line of metrics.jsonl."""
        self.seconds += seconds
        self.tokens += tokens
        return {"step": self.step, **numbers, "tokens": tokens, "seconds": seconds}

    def judged(self, value: float, higher_is_better: bool) -> bool:
        """Take note of a main metric; whether it is the best so far (not a number never is)."""
        self.without_better += 1
        if math.isnan(value) or (
            self.best is not None and (value <= self.best if higher_is_better else value >= self.best)
        ):
            return False
        self.best, self.best_step, self.without_better = value, self.step, 0
        return True
