"""metrics.jsonl: a line per optimizer step and per evaluation, whole lines only, cut back when a run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.io.files import json_safe, write_atomically


class MetricsFile:
    """Opened for appending at the first line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; nan and infinity become null."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed in close
        # Unbuffered and in one call: whoever kills the process leaves whole lines.
        line = memoryview(json.dumps(json_safe(record)).encode() + b"\n")
        while line:  # a disk that is filling up takes a part, and the next time says why
            line = line[self._file.write(line) :]

    def rewind(self, step: int, evaluated: bool = True) -> tuple[int, dict[str, Any] | None]:
        """Drop every line after `step`, and unless it is `evaluated` an evaluation at that step.

        Returns:
            how many other lines were dropped because they could not be read, and the last training line if such an
            evaluation was there.
        """
        self.close()
        if not self.path.exists():
            return 0, None
        kept, unreadable, trained, dropped = [], 0, None, False
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line)
                wanted = record["step"] <= step
                undone = record["step"] == step and "loss" not in record and not evaluated
            except (ValueError, TypeError, KeyError):
                unreadable += 1
                continue
            dropped = dropped or undone
            if wanted and not undone:
                kept.append(line + "\n")
                trained = record if "loss" in record else trained
        write_atomically(self.path, "".join(kept))
        return unreadable, trained if dropped else None

    def sync(self) -> None:
        """See every line on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """A later append opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None
