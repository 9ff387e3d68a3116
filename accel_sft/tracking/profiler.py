"""Traces a few optimizer steps with torch's profiler, for `--profile`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch


@contextlib.contextmanager
def profiler(folder: Path | None, rank: int, log: Callable[[str], None]) -> Iterator[Any]:
    """Call the result's `step()` after each optimizer step: steps 3-5 are traced to a file in `folder`.

    Args:
        folder: None: nothing is traced.
        log: takes a line that says where the trace is.
    """
    if folder is None:
        yield _NoProfiler()
        return
    worker = f"rank{rank}"
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1),
        on_trace_ready=torch.profiler.tensorboard_trace_handler(str(folder), worker_name=worker),
        record_shapes=True,
        profile_memory=True,
    ) as active:
        yield active
    if list(folder.glob(f"{worker}.*")):
        log(f"profile: {folder} (open its files in ui.perfetto.dev or chrome://tracing)")
    else:
        log("profile: nothing was traced, it begins with the third step")


class _NoProfiler:
    def step(self) -> None:
        """Nothing is traced."""
