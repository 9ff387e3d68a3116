"""Records a run: metrics.jsonl, sample answers, TensorBoard and other trackers, progress bar, memory at start-up."""

import contextlib
import math
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from accel_sft.api.config import TrainConfig
from accel_sft.io.files import is_number, write_json_lines
from accel_sft.io.run_dir import RunDir, step_of
from accel_sft.io.text import markdown_table, shown
from accel_sft.results.run_report import COSTS, Samples, samples_table
from accel_sft.tracking.disturbed import KEY, marks
from accel_sft.tracking.idle import IdleWatch
from accel_sft.tracking.metrics_file import MetricsFile
from accel_sft.tracking.progress_bar import ProgressBar
from accel_sft.tracking.services import Trackers, tracker_names
from accel_sft.tracking.system import (
    PhasePeaks,
    Reading,
    Readings,
    SystemSampler,
    Usage,
    device_memory_gib,
    host_memory_gib,
    seconds_since_start,
)
from accel_sft.tracking.time_spent import PAUSE, TimeSpent, taken

_CURVES = {
    "tokens_per_second": "throughput/tokens_per_second",
    "tokens_per_second_per_device": "throughput/tokens_per_second_per_device",
    "mfu": "throughput/mfu",
    "seconds": "throughput/step_seconds",
    "tokens": "throughput/tokens",
    "supervised_tokens": "throughput/supervised_tokens",
}


_LOGGED = 6
"""Maximum number of an evaluation's metrics in its line at the terminal."""
_PAUSE_SECONDS = 0.05
"""If more seconds pass between two steps, this is a pause: then the next readings are not only about steps."""


class Tracker(contextlib.AbstractContextManager):
    """Records and shows a run. Every rank has a Tracker, and rank 0 writes. Only `phases()` may be a collective.

    The bar shows `main_metric`. The bar and `log` print to the stream `terminal`, by default standard output.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run_dir: RunDir,
        config: TrainConfig,
        *,
        total_steps: int,
        main_metric: str | None = None,
        terminal: Any = None,
    ) -> None:
        names = tracker_names(config.tracker)
        self.accelerator, self.run_dir, self.config, self.main_metric = accelerator, run_dir, config, main_metric
        self._readings, self._usage, self._idle = Readings(), Usage(), IdleWatch()
        self._time = TimeSpent()
        self._recorded: list[dict[str, Any]] = []  # phases of this rank
        self._phases: list[dict[str, Any]] = []  # phases of every rank
        self.peaks = PhasePeaks(accelerator.device)
        self._metrics = MetricsFile(run_dir.metrics)
        self._line = ProgressBar(total_steps, log_every=config.log_every, file=terminal)
        self._writes = accelerator.is_main_process
        if self._writes:
            run_dir.path.mkdir(parents=True, exist_ok=True)
        self._system = SystemSampler(accelerator.device, self.log)
        self._trackers = Trackers(names if self._writes else (), run_dir.path, config.as_dict(), self.log)
        self._show_settings()

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, text: str) -> None:
        """Print a line above the bar, on rank 0."""
        if self._writes:
            self._line.log(text)

    def phase(self, name: str) -> None:
        """Record this rank's memory, and the seconds since its process started, at the end of a start-up phase. All
        ranks record the same names."""
        row = {"phase": name, "rank": self.accelerator.process_index, "seconds": seconds_since_start()}
        memory = device_memory_gib(self.accelerator.device)
        on_device = {f"device_{key}_gib": value for key, value in memory.items()}
        self._recorded.append({**row, "process_memory_gib": host_memory_gib()["now"], **on_device})

    def phases(self) -> list[dict[str, Any]]:
        """Every rank's phases in order: `phase`, `rank`, `seconds` since the rank's process started, and GiB of process
        memory and of device memory (the latter None without CUDA). A collective if a phase is new."""
        if len(self._phases) < len(self._recorded) * self.accelerator.num_processes:
            every = gather_object([self._recorded])
            self._phases = [row for of_ranks in zip(*every, strict=True) for row in of_ranks]
        return self._phases

    def system(self) -> list[float]:
        """This rank's `Reading`, at most a second old, as a list of numbers that ranks exchange."""
        return [*self._system.sample()]

    def step(
        self, record: Mapping[str, Any], system: Sequence[Sequence[float]] = (), forward_seconds: float = math.nan
    ) -> None:
        """Record one optimizer step: `step`, `tokens`, `seconds` and any other numbers. Tokens per second are
        added. `system` is each rank's `system()`; `forward_seconds` is the time of this rank's batches and forwards."""
        seconds, times = taken()
        self._system.forward_seconds += forward_seconds
        if not self._writes:
            return
        record = dict(record)
        if record.get("seconds"):
            speed = record["tokens"] / record["seconds"]
            record["tokens_per_second"] = speed
            record["tokens_per_second_per_device"] = speed / self.accelerator.num_processes
        readings = [Reading(*numbers) for numbers in system]
        new = self._readings.new(readings, paused=seconds.get(PAUSE, 0.0) > _PAUSE_SECONDS)
        curves = _training_curves(record)
        for rank, reading in new.items():
            self._usage.add(rank, reading.now)
            fields = reading.now._asdict().items()
            curves |= {f"system/rank{rank}/{k}": v for k, v in fields if k != "sample" and not math.isnan(v)}
        if 0 in new and new[0].before:
            record[KEY] = marks(readings)
        self._metrics.append(record)
        self._trackers.curves(curves, record["step"])
        self._time.add(record.get("seconds", 0.0), seconds)
        if warning := self._idle.step(record, seconds, times, new, len(readings)):
            self.log(warning)
        self._line.step(record)

    def evaluation(self, step: int, metrics: Mapping[str, Any], samples: Samples) -> None:
        """Record an evaluation after `step` steps: its numbers (`run_report.COSTS` among them), and every answer."""
        if not self._writes:
            return
        self._metrics.append({"step": step, **metrics})
        self._trackers.curves({f"eval/{key.removeprefix('eval_')}": value for key, value in _numbers(metrics)}, step)
        if samples:
            self._trackers.text("eval/samples", samples_table(samples), step)
        self._trackers.flush()
        self.run_dir.samples.mkdir(exist_ok=True)
        write_json_lines(self.run_dir.answers(step), samples)
        quality = {key: value for key, value in _numbers(metrics) if key not in COSTS}
        main = self.main_metric
        if main in quality:
            self._line.evaluated({main: quality[main]})
        order = [main, "eval_loss", "pair_margin", "ranked_right"]
        first = sorted(quality, key=lambda key: order.index(key) if key in order else len(order))[:_LOGGED]
        self.log("  ".join([f"step {step}:", *(f"{key} {shown(quality[key])}" for key in first)]))

    def flush(self) -> None:
        """Write all lines to the disk, and hand all curves to the system, before a checkpoint: a resume needs them."""
        self._metrics.sync()
        self._trackers.flush()

    @property
    def chain(self) -> str:
        """`chained` over the lines of metrics.jsonl so far; "" on ranks other than 0."""
        return self._metrics.chain if self._writes else ""

    def rewind(self, step: int, evaluated: bool = True, chain: str = "") -> None:
        """Delete what the run recorded after `step`, where it now resumes. Also delete the evaluation at `step`, unless
        the checkpoint has it (`evaluated`). `chain` is that of the checkpoint. With step 0, the run starts over."""
        self._line.done = step
        if not self._writes:
            return
        last = step if step > 0 else -1
        unreadable, again = self._metrics.rewind(last, evaluated, chain)
        if unreadable:
            self.log(f"{self._metrics.path}: {unreadable} unreadable lines were dropped")
        for samples in self.run_dir.all_answers():
            if step_of(samples) > last - (again is not None):
                samples.unlink()
        self._trackers.rewind(last - (again is not None))
        if again:  # TensorBoard dropped the whole step, training curves too
            self._trackers.curves(_training_curves(again), last)
        if last < 0:
            self._show_settings()

    def profiler(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context; call its value's `step()` after each optimizer step. --profile traces steps 3 to 5."""
        if not self.config.profile:
            return contextlib.nullcontext(types.SimpleNamespace(step=lambda: None))
        return traced_steps(self.run_dir.profile, self.accelerator.process_index, self.log)

    def watched(self) -> dict[str, Any]:
        """What result.json says of the machine: `system` by rank and, if known, `time_spent`."""
        spent = self._time.totals()
        return {"system": self._usage.by_rank(), **({"time_spent": spent} if spent else {})}

    def close(self) -> None:
        """End the bar and every tracker; a second call does nothing."""
        self._line.close()
        self._metrics.close()
        self._trackers.close()

    def _show_settings(self) -> None:
        rows = list(self.config.as_dict().items())
        self._trackers.text("settings", markdown_table(["setting", "value"], rows), 0)


_SKIPPED, _WARMUP, _TRACED = 1, 1, 3


@contextlib.contextmanager
def traced_steps(folder: Path, rank: int, log: Callable[[str], None]) -> Iterator[Any]:
    """Trace steps 3 to 5 into `folder`; call `step()` of the yielded object after each optimizer step."""
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
        log(f"profile: no whole step was traced, because tracing begins at step {_SKIPPED + _WARMUP + 1} after a start")


def _training_curves(record: Mapping[str, Any]) -> dict[str, float]:
    return {_CURVES.get(key, f"train/{key}"): value for key, value in _numbers(record) if key != "step"}


def _numbers(values: Mapping[str, Any]) -> list[tuple[str, float]]:
    return [(key, value) for key, value in values.items() if is_number(value)]
