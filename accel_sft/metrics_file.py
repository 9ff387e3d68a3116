"""metrics.jsonl: a line per optimizer step and per evaluation, whole lines only, cut back when a run resumes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_sft.report import json_safe, write_atomically


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
        self._file.write(json.dumps(json_safe(record)).encode() + b"\n")

    def rewind(self, step: int) -> int:
        """Drop every line after `step`. Returns how many other lines were dropped because they could not be read."""
        self.close()
        if not self.path.exists():
            return 0
        kept, unreadable = [], 0
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                wanted = json.loads(line)["step"] <= step
            except (ValueError, TypeError, KeyError):
                unreadable += 1
                continue
            if wanted:
                kept.append(line + "\n")
        write_atomically(self.path, "".join(kept))
        return unreadable

    def close(self) -> None:
        """A later append opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None
