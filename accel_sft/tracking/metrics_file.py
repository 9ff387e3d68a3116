"""Writes metrics.jsonl: a whole line per optimizer step and per evaluation. A resume drops the lines after its step."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.io.files import is_number, json_safe, read_json_lines, write_atomically


def chained(chain: str, line: bytes) -> str:
    """The chain after one more line (with its newline): a SHA-256 over the chain so far and this line. Before the first
    line the chain is ""."""
    return hashlib.sha256(chain.encode() + line).hexdigest()


class MetricsFile:
    """The run's metrics.jsonl; the first append opens it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._chain, self._chained = "", 0  # the chain over the file's first bytes, and the number of these bytes
        self._file: Any = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line; NaN and infinity become null."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 - closed in close
        # Unbuffered and in one call: a kill leaves whole lines only.
        line = memoryview(_line(record).encode())
        while line:  # a full disk may take a part of the line, and raise only at the next write
            line = line[self._file.write(line) :]

    @property
    def chain(self) -> str:
        """`chained` over all lines; checkpoints record it, so that `verify` finds lines that were changed later. The
        chain is updated only when this property is read, so that appending lines costs nothing more."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._chained)
                for line in file:
                    self._chain = chained(self._chain, line)
                self._chained = file.tell()
        return self._chain

    def rewind(self, step: int, evaluated: bool = True, chain: str = "") -> tuple[int, dict[str, Any] | None]:
        """Drop every line after `step`, and the evaluation at `step` unless the checkpoint contains it (`evaluated`).
        The new chain continues the checkpoint's `chain`, so that later edits of the file stay visible. Returns the
        number of unreadable lines (also dropped) and, if an evaluation at `step` was dropped, the last training line,
        else None."""
        self.close()
        self._chain, self._chained = chain, 0
        if not self.path.exists():
            return 0, None
        rows, unreadable = read_json_lines(self.path)
        readable = [row for row in rows if is_number(row.get("step"))]
        undone = [row for row in readable if row["step"] == step and "loss" not in row and not evaluated]
        remaining = [row for row in readable if row["step"] <= step and row not in undone]
        write_atomically(self.path, "".join(map(_line, remaining)))
        if chain:
            self._chained = self.path.stat().st_size
        trained = [row for row in remaining if "loss" in row][-1:] if undone else []
        return unreadable + len(rows) - len(readable), next(iter(trained), None)

    def sync(self) -> None:
        """Flush every line to the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a later append opens it again."""
        if self._file is not None:
            self._file.close()
        self._file = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(json_safe(record)) + "\n"


def mean_mfu(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean MFU of these lines, weighted by step time; None if no line has an MFU."""
    pairs = [(line.get("mfu"), line.get("seconds")) for line in lines]
    steps = [(mfu, seconds) for mfu, seconds in pairs if isinstance(mfu, float) and isinstance(seconds, float)]
    total = sum(seconds for _, seconds in steps)
    return sum(mfu * seconds for mfu, seconds in steps) / total if total else None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl; [] without a file. A half-written line is left out."""
    if not path.exists():
        return []
    return [line for line in read_json_lines(path)[0] if isinstance(line.get("step"), int)]
