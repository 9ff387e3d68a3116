"""`--profile`: traces a few steps on every rank, and says in a sentence where their time went."""

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from accel_sft.tracking.trace import time_sentence, time_spent

_SKIPPED, _WARMUP, _TRACED = 1, 1, 3


@contextlib.contextmanager
def traced_steps(
    folder: Path, rank: int, ranks: int, log: Callable[[str], None], report: Callable[[dict[str, Any]], None] | None
) -> Iterator[Any]:
    """Call the result's `step()` after each optimizer step: the third to the fifth are traced into `folder`.

    Args:
        report: called with what `time_spent` reads from the trace; None: the trace is not read.
    """
    worker = f"rank{rank}"
    write = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=worker)
    traced: list[Path] = []

    def ready(profiler: Any) -> None:
        write(profiler)
        traced.append(max(folder.glob(f"{worker}.*"), key=lambda path: path.stat().st_mtime_ns))
        log(f"profile: {folder} (open its files in ui.perfetto.dev or chrome://tracing)")
        if report is None:
            return
        if (spent := time_spent(traced[-1])) is None:
            log(f"profile: it holds no whole step; tracing begins with step {_SKIPPED + _WARMUP + 1} of a start")
        else:
            spent |= {"rank": rank, "ranks": ranks}
            log(f"profile: {time_sentence(spent)}; tracing itself takes time")
            report(spent)

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=_SKIPPED, warmup=_WARMUP, active=_TRACED, repeat=1),
        on_trace_ready=ready,
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        yield profiler
    if not traced:
        log(f"profile: nothing was traced, it begins with step {_SKIPPED + _WARMUP + 1} of a start")


def untraced() -> contextlib.AbstractContextManager:
    """Stands in for `traced_steps` without --profile: `step()` does nothing."""
    return contextlib.nullcontext(types.SimpleNamespace(step=lambda: None))
