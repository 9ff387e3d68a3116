"""Reports steps with a NaN or infinite loss or gradient, and their examples. Such steps change no weights."""

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import is_number, json_safe, read_json_lines, write_json_lines
from accel_sft.io.run_dir import RunDir

MOST_IN_A_ROW = 10
"""Number of consecutive skipped steps at which `--on-nonfinite skip` gives up."""
_SHOWN = 8


class Anomalies:
    """Checks each step's loss and gradient norm, which are the same on every rank. Only a rank with `writes` writes the
    file. Under fp16 an infinite gradient is no anomaly: gradients overflow until the scaler has found a loss scale."""

    def __init__(
        self, run_dir: RunDir, on_nonfinite: str, precision: str, log: Callable[[str], None], writes: bool
    ) -> None:
        self.file = run_dir.nonfinite
        self.on_nonfinite, self.precision = on_nonfinite, precision
        self.log, self.writes = log, writes
        self._in_a_row = 0

    def rewind(self, step: int) -> None:
        """Drop the records of steps after `step`, because the resumed run repeats those steps."""
        if self.writes and self.file.exists():
            rows, _ = read_json_lines(self.file)
            write_json_lines(self.file, (row for row in rows if is_number(row.get("step")) and row["step"] <= step))

    def left_out(self) -> int:
        """How many steps of the run were skipped."""
        return len(self.file.read_text(encoding="utf-8").splitlines()) if self.file.exists() else 0

    def look(self, step: int, loss: float, grad_norm: float, examples: Sequence[Any]) -> None:
        """Check loss and gradient of step `step` (from 1). If either is not finite, the step has changed no weights."""
        if math.isfinite(loss) and (math.isfinite(grad_norm) or self.precision == "fp16"):
            self._in_a_row = 0
            return
        indices = [example.index for example in examples]
        if self.writes:
            record = json_safe({"step": step, "loss": loss, "grad_norm": grad_norm, "examples": indices})
            with self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        problem = f"the gradient norm is {grad_norm}" if math.isfinite(loss) else f"the loss is {loss}"
        first_examples = ", ".join(map(str, indices[:_SHOWN]))
        message = f"step {step}: {problem}, so the step was skipped; "
        message += f"its training examples are {first_examples} (all in {self.file})"
        self._in_a_row += 1
        if self.on_nonfinite == "stop":
            raise UserError(f"{message}. Check the examples, then continue with --resume auto --on-nonfinite skip")
        if self._in_a_row >= MOST_IN_A_ROW:
            fix = "start a new run with a lower --learning-rate"
            raise UserError(f"{message}; this is the {MOST_IN_A_ROW}th such step in a row; {fix}")
        self.log(message)
