"""Shows progress at the terminal: one bar that fits the line, or plain lines where there is no terminal."""

import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.text import Text

from accel_sft.io.files import is_number
from accel_sft.io.terminal import wrapped

SHORTEST_BAR = 6
"""Least width of the bar, in terminal cells. Details are left out of the line until the bar is that wide."""
SECONDS_BETWEEN_DRAWS = 0.5


class ProgressBar:
    """Shows steps done, the step's loss, the last evaluation's metrics, the step's tokens per second and time to go.

    On a terminal it is one line at the bottom, redrawn at most twice a second; elsewhere (a file, a pipe, a
    cluster's log) a plain line every `log_every` steps, without control characters. `done` counts the finished
    steps; the run has `total_steps`.
    """

    def __init__(self, total_steps: int, *, log_every: int = 10, file: Any = None) -> None:
        self.total_steps = total_steps
        self.log_every = log_every
        self.done = 0
        self._metrics: dict[str, float] = {}
        self._file = file or sys.stdout
        self._console = Console(file=self._file, highlight=False)
        # FORCE_COLOR makes rich believe in a terminal where there is a pipe: ask the file itself too.
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
                self.log(self._plain(now))
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

    def _plain(self, now: float) -> str:
        parts, record = [f"step {self.done}/{self.total_steps}"], self._record
        parts += [f"{name} {_short(record[name])}" for name in ("epoch", "loss", "grad_norm") if name in record]
        if "learning_rate" in record:
            parts.append(f"lr {record['learning_rate']:.2e}")
        if "tokens_per_second" in record:
            parts.append(" ".join([f"{record['tokens_per_second']:,.0f} tokens/s", *self._of_devices().values()]))
        return "  ".join([*parts, self._time_to_go(now)])

    def _of_devices(self) -> dict[str, str]:
        """Tokens per second of one device (`per_device`), if there are several, and `mfu`, if it is known, in words."""
        record, words = self._record, {}
        per_device = record.get("tokens_per_second_per_device", record["tokens_per_second"])
        if per_device != record["tokens_per_second"]:
            words["per_device"] = f"({per_device:,.0f} each)"
        if "mfu" in record:
            words["mfu"] = f"MFU {record['mfu']:.1%}"
        return words

    def _time_to_go(self, now: float) -> str:
        """The time to go, from the mean time of a step since this process finished its first one; evaluations and
        checkpoints count. It is -:--:-- until a second step is done."""
        if self._first is None or self.done <= self._first[0]:
            return "ETA -:--:--"
        step, began = self._first
        seconds = (now - began) / (self.done - step) * max(self.total_steps - self.done, 0)
        minutes, rest = divmod(round(seconds), 60)
        return f"ETA {minutes // 60}:{minutes % 60:02}:{rest:02}"

    def _draw(self, now: float) -> None:
        if self._bar is None:
            shared = self._file is sys.stdout  # if so, rich prints this process's other output above the bar
            # auto_refresh would start a thread, which takes time from the training loop
            self._bar = Live(console=self._console, auto_refresh=False, redirect_stdout=shared, redirect_stderr=shared)
            self._bar.start()
            self._console.show_cursor(True)  # a killed run must not leave the terminal without a cursor
        self._drawn = now
        self._bar.update(self._text(now), refresh=True)

    def _text(self, now: float) -> Text:
        """The count, a bar and the details, of which the least important are left out until the line fits."""
        count, record = f"{self.done}/{self.total_steps}", self._record
        details = {"loss": f"loss {_short(record['loss'])}"} if "loss" in record else {}
        details["metrics"] = "  ".join(f"eval {name} {_short(value)}" for name, value in self._metrics.items())
        if "tokens_per_second" in record:
            details["rate"] = f"now {record['tokens_per_second']:,.0f} tok/s"
            details |= self._of_devices()
        if self.done < self.total_steps:
            details["left"] = self._time_to_go(now)
        for least in ("", "per_device", "mfu", "rate", "metrics", "loss", "left"):
            details.pop(least, None)
            text = "  ".join(filter(None, details.values()))
            bar_length = self._console.width - cell_len(count) - cell_len(text) - 3  # the last column stays empty
            if bar_length >= SHORTEST_BAR:
                break
        bar_length = max(bar_length, 0)
        full = min(bar_length * self.done // max(self.total_steps, 1), bar_length)
        done, to_do = "#-" if self._console.options.ascii_only else "━━"
        line = Text(f"{count} ", no_wrap=True, overflow="crop")
        return line.append(done * full, "cyan").append(to_do * (bar_length - full), "bright_black").append(f" {text}")


def _short(value: float) -> str:
    return f"{value:.3f}" if 0.001 <= abs(value) < 1000 or value == 0 else f"{value:.2e}"
