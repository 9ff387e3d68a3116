"""Lets a driver run a trainer a few optimizer steps at a time, so that contestants alternate on one machine.

A contestant calls `boundary` between optimizer steps. After the warm-up it says so and waits; each line `N` on its
standard input lets it run N steps, after which it answers with one JSON line; `stop` ends it.
"""

from __future__ import annotations

import json
import os
import sys
import time


class Gate:
    """The turnstile between two optimizer steps."""

    def __init__(self, warmup_steps: int) -> None:
        self.left, self.started = warmup_steps, time.perf_counter()
        self.report: dict = {}
        # libraries print what they like to standard output; the driver reads a copy that only we write to
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def note(self, **facts: object) -> None:
        """Facts for the next answer, such as the first step's loss."""
        self.report.update(facts)

    def boundary(self) -> None:
        """An optimizer step is done."""
        self.left -= 1
        if self.left:
            return
        self.out.write(json.dumps({**self.report, "seconds": time.perf_counter() - self.started}) + "\n")
        self.report = {}
        order = sys.stdin.readline().strip()
        if order in ("", "stop"):
            os._exit(0)
        self.left, self.started = int(order), time.perf_counter()
