"""Shows progress in one line at the bottom of the terminal. Without a terminal, prints a plain line now and then."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from accel_sft.io.files import is_number
from accel_sft.io.terminal import wrapped
from accel_sft.io.text import shown

SECONDS_BETWEEN_DRAWS = 0.5
_BAR = 12
"""Width of the bar, in terminal cells."""


class ProgressBar:
    """Shows steps done, time to go, the step's loss, the last evaluation's metrics and tokens per second. On a terminal
    this is one line at the bottom, redrawn at most twice a second; elsewhere, a plain line every `log_every` steps."""

    def __init__(self, total_steps: int, *, log_every: int = 10, file: Any = None) -> None:
        self.total_steps = total_steps
        self.log_every = log_every
        self.done = 0
        self._metrics: dict[str, float] = {}
        self._file = file or sys.stdout
        self._console = Console(file=self._file, highlight=False)
        # with FORCE_COLOR, rich takes even a pipe for a terminal: ask the file itself too.
        self.live = self._console.is_terminal and self._file.isatty() and not self._console.is_dumb_terminal
        self._bar: Live | None = None
        self._record: dict[str, float] = {}
        self._drawn = 0.0
        self._first: tuple[int, float] | None = None

    def log(self, text: str) -> None:
        """Print a line above the bar."""
        if self.live:
            self._console.print(wrapped(text), markup=False, soft_wrap=True)
        else:
            print(text, file=self._file, flush=True)

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a training record: its `step` and, if it has them, `loss`, `learning_rate` and the like."""
        now = time.monotonic()
        self.done = int(record["step"])
        self._record = {key: value for key, value in record.items() if is_number(value)}
        if self._first is None:  # the first step compiles and warms up: the rate is measured after it
            self._first = (self.done, now)
        last = self.done >= self.total_steps
        if not self.live:
            if self.done % self.log_every == 0 or last:
                self.log("  ".join([f"step {self.done}/{self.total_steps}", *self._details(now)]))
        elif last or now - self._drawn >= SECONDS_BETWEEN_DRAWS:
            self._draw(now)

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """Show these metrics from now on."""
        self._metrics = dict(metrics)
        if self._bar is not None:
            self._draw(time.monotonic())

    def close(self) -> None:
        """Draw the bar for the last time and release the terminal."""
        if self._bar is not None:
            self._draw(time.monotonic())
            self._bar.stop()
            self._bar = None

    def _details(self, now: float) -> list[str]:
        """The step's numbers, the most important first, because the end of the line may not fit."""
        record = self._record
        parts = [self._time_to_go(now)] if self.done < self.total_steps else []
        parts += [f"loss {shown(record['loss'])}"] if "loss" in record else []
        parts += [f"eval {name} {shown(value)}" for name, value in self._metrics.items()]
        parts += [f"{record['tokens_per_second']:,.0f} tokens/s"] if "tokens_per_second" in record else []
        parts += [f"MFU {record['mfu']:.1%}"] if "mfu" in record else []
        parts += [f"lr {record['learning_rate']:.2e}"] if "learning_rate" in record else []
        return parts + [f"{name} {shown(record[name])}" for name in ("grad_norm", "epoch") if name in record]

    def _time_to_go(self, now: float) -> str:
        """The remaining time, estimated from the mean time per step since this process's first step, evaluations and
        checkpoints included."""
        if self._first is None or self.done <= self._first[0]:
            return "ETA -:--:--"
        step, began = self._first
        seconds = (now - began) / (self.done - step) * (self.total_steps - self.done)
        minutes, rest = divmod(round(seconds), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02}:{rest:02}"

    def _draw(self, now: float) -> None:
        if self._bar is None:
            shared = self._file is sys.stdout  # if true, rich prints this process's other output above the bar
            # auto_refresh would start a thread, which takes time from the training loop
            self._bar = Live(console=self._console, auto_refresh=False, redirect_stdout=shared, redirect_stderr=shared)
            self._bar.start()
            self._console.show_cursor(True)  # a killed run must not leave the terminal without a cursor
        self._drawn = now
        full = min(_BAR * self.done // max(self.total_steps, 1), _BAR)
        done, to_do = "#-" if self._console.options.ascii_only else "━━"
        line = Text(f"{self.done}/{self.total_steps} ", no_wrap=True, overflow="ellipsis")
        line.append(done * full, "cyan").append(to_do * (_BAR - full), "bright_black")
        self._bar.update(line.append(" " + "  ".join(self._details(now))), refresh=True)
