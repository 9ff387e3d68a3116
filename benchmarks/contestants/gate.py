"""Lets a driver run a trainer a few optimizer steps at a time, so that contestants alternate on one machine.

A contestant calls `boundary` between optimizer steps. After the warm-up it answers with a JSON line and waits. A line
`N` on its standard input lets it run N steps and answer with another JSON line; `stop` ends it.

With `steps` and `answer` among its settings it does not wait: it runs these steps once, rank 0 writes the answer to
that file, and the process of each rank ends.
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
    """Holds a trainer between two optimizer steps.

    Args:
        settings: `warmup_steps`; and either both `steps` and `answer`, or neither. With `count`, the first answer has
            the FLOPs of the warm-up's last step (which is not its first). With `cpu_seconds`, seconds are those that
            the process computed, so other programs hardly change them.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        self.clock = time.process_time if settings.get("cpu_seconds") else time.perf_counter
        self.left, self.started = settings["warmup_steps"], self.clock()
        self.steps, self.answer = settings.get("steps"), settings.get("answer")
        self.report: dict = {}
        self.counting: Any = None
        self.count = settings.get("count", False)
        # libraries print to standard output too; the driver reads a copy that only we write to
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def note(self, **facts: object) -> None:
        """Add facts to the next answer, such as the first step's loss."""
        self.report.update(facts)

    def boundary(self) -> None:
        """Call this after each optimizer step."""
        self.left -= 1
        if self.count and self.left == 1:
            from counted import Counted

            self.count, self.counting = False, Counted()
            self.counting.__enter__()
        if self.left:
            return
        if self.counting:
            self.counting.__exit__(None, None, None)
            self.note(flops=self.counting.flops)
            self.counting = None
        device = _device()
        if device:
            device.synchronize()
        seconds = self.clock() - self.started
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
        self.started = self.clock()


def _device() -> Any:
    """torch.cuda, if torch is imported and has a GPU; else None."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_available() else None


def _host_peak_gib() -> float | None:
    """Peak resident memory of this process in GiB; None if /proc does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) * 1024 / GIB for line in lines if line.startswith("VmHWM:")), None)
