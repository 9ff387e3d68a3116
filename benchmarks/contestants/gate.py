"""Lets a driver run a trainer a few optimizer steps at a time, so that contestants alternate on one machine.

A contestant calls `boundary` between optimizer steps. After the warm-up it says so and waits; each line `N` on its
standard input lets it run N steps, after which it answers with one JSON line; `stop` ends it.

With `steps` and `answer` among its settings it asks nobody: those steps are run once, the answer is written to that
file, and the process ends, of several ranks each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

GIB = 2**30


class Gate:
    """The turnstile between two optimizer steps.

    Args:
        settings: `warmup_steps`; and `steps` and `answer`, or neither.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.left, self.started = settings["warmup_steps"], time.perf_counter()
        self.steps, self.answer = settings.get("steps"), settings.get("answer")
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
        device = _device()
        if device:
            device.synchronize()
        seconds = time.perf_counter() - self.started
        if self.answer is None:
            self.out.write(json.dumps({**self.report, "seconds": seconds}) + "\n")
            self.report = {}
            order = sys.stdin.readline().strip()
            if order in ("", "stop"):
                os._exit(0)
            self.left = int(order)
        elif "peak_before_gib" not in self.report:  # the warm-up is done
            self.note(peak_before_gib=device.max_memory_allocated() / GIB if device else None)
            if device:
                device.reset_peak_memory_stats()
            self.left = self.steps
        else:
            if os.environ.get("RANK", "0") == "0":
                peak = device.max_memory_allocated() / GIB if device else None
                facts = {**self.report, "seconds": seconds, "peak_gib": peak, "host_peak_gib": _host_peak_gib()}
                Path(self.answer).write_text(json.dumps(facts))
            os._exit(0)
        self.started = time.perf_counter()


def _device() -> Any:
    """torch.cuda, if the trainer computes there."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _host_peak_gib() -> float | None:
    """Largest resident memory of this process so far (Linux)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 / GIB for line in lines if line.startswith("VmHWM:")), None)
