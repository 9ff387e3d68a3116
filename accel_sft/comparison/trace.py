"""What a run's profiler trace says of the time in which its rows are read and made into tensors."""

import json
from pathlib import Path
from typing import Any

from accel_sft.io.run_dir import BATCH_SPAN


def batch_share(folder: Path) -> dict[str, float] | None:
    """The traced `steps` of one rank, their `step_seconds`, and the `batch_seconds` in them; None without a trace.

    Counted is all from a step's begin to its first batch (rows are drawn, read and divided into forwards), and all
    making of batches, their copy to the device included: what loader workers, prefetching and pinned memory speed up.
    """
    for path in sorted(folder.glob("*.pt.trace.json")):
        try:
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        except (OSError, ValueError, KeyError):  # of a run that was killed while it wrote
            continue
        spans = [event for event in events if event.get("cat") == "user_annotation"]
        steps = [span for span in spans if span["name"].startswith("ProfilerStep")]
        batches = [span for span in spans if span["name"] == BATCH_SPAN]
        if steps and batches:
            return {
                "steps": len(steps),
                "step_seconds": sum(step["dur"] for step in steps) / 1e6,
                "batch_seconds": sum(_of_step(step, batches) for step in steps) / 1e6,
            }
    return None


def _of_step(step: dict[str, Any], batches: list[dict[str, Any]]) -> float:
    """Microseconds."""
    mine = [batch for batch in batches if step["ts"] <= batch["ts"] < step["ts"] + step["dur"]]
    first = min((batch["ts"] for batch in mine), default=step["ts"])
    return first - step["ts"] + sum(batch["dur"] for batch in mine)
