"""`--profile`: traces a few steps on every rank."""

import contextlib
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

_SKIPPED, _WARMUP, _TRACED = 1, 1, 3


@contextlib.contextmanager
def traced_steps(folder: Path, rank: int, log: Callable[[str], None]) -> Iterator[Any]:
    """Yield an object whose `step()` is to be called after each optimizer step; steps 3-5 are traced into `folder`."""
    write = torch.profiler.tensorboard_trace_handler(str(folder), worker_name=f"rank{rank}")

    def ready(profiler: Any) -> None:
        write(profiler)
        log(f"profile: {folder} (open its files in ui.perfetto.dev or chrome://tracing)")

    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=_SKIPPED, warmup=_WARMUP, active=_TRACED, repeat=1),
        on_trace_ready=ready,
        record_shapes=True,
        profile_memory=True,
    ) as profiler:
        yield profiler
    if profiler.step_num <= _SKIPPED + _WARMUP:
        log(f"profile: no whole step was traced: tracing begins with step {_SKIPPED + _WARMUP + 1} of a start")


def untraced() -> contextlib.AbstractContextManager[Any]:
    """Stands in for `traced_steps` without --profile: `step()` does nothing."""
    return contextlib.nullcontext(types.SimpleNamespace(step=lambda: None))
