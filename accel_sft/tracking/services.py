"""Sends curves and texts to TensorBoard and to Accelerate's trackers. Add here a tracker that Accelerate lacks."""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import LoggerType
from tensorboard.compat.proto.summary_pb2 import Summary

from accel_sft.api.errors import UserError
from accel_sft.io.files import write_atomically

_NO_NAME = re.compile(r"[^\w./: -]")
"""Characters that MLflow does not accept in names of curves; curves of data sources are named after files."""
FLUSH_SECONDS = 5
"""Seconds between writes of TensorBoard's points, which a killed run may lose; metrics.jsonl loses none."""


def tracker_names(setting: str) -> list[str]:
    """The names in `--tracker`; UserError if Accelerate does not know a name, or its package is missing."""
    names = list(dict.fromkeys(name.strip() for name in setting.split(",") if name.strip() not in ("", "none")))
    missing = {str(kind) for kind in LoggerType} - {str(kind) for kind in get_available_trackers()}
    problems = []
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            names_of_all = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
            problems.append(f"--tracker {name}: unknown; give one or several of {names_of_all}, or none")
        elif name in missing:
            problems.append(f"--tracker {name}: not installed; `pip install {name.replace('_', '-')}`, or leave it out")
    if problems:
        raise UserError(*problems)
    return names


class Trackers:
    """Rank 0's trackers, named as in `tracker_names`. A service that fails during the run is logged and dropped, but
    TensorBoard's errors are raised. Its events lie in `run_dir` itself: so `--logdir runs` shows the run's name."""

    def __init__(
        self, names: Sequence[str], run_dir: Path, settings: Mapping[str, Any], log: Callable[[str], None]
    ) -> None:
        self._run_dir, self._log = run_dir, log
        self._writer: Any = None  # torch.utils.tensorboard.SummaryWriter
        self._others: list[GeneralTracker] = []
        name_of_run = settings.get("run_name") or run_dir.name
        # so that a resumed run continues its curves
        same = {"id": _id_in_services(run_dir), "resume": "allow"} if {"wandb", "swanlab"} & {*names} else {}
        arguments = {
            "wandb": {"name": name_of_run, "dir": str(run_dir), **same},
            "swanlab": {"experiment_name": name_of_run, "logdir": str(run_dir / "swanlab"), **same},
            "mlflow": {"run_name": name_of_run},
            "trackio": {"name": name_of_run, "resume": "allow"},
            "clearml": {"task_name": name_of_run},
        }
        for name in names:
            kind = LOGGER_TYPE_TO_CLASS[name]
            if name == "tensorboard":
                self._writer = _tensorboard(run_dir)
                continue
            place = [str(run_dir)] if kind.requires_logging_directory else []
            tracker = kind(settings.get("tracker_project", "accel_sft"), *place, **arguments.get(name, {}))
            try:
                tracker.start()
                tracker.store_init_configuration(dict(settings))
            except Exception as error:
                raise UserError(f"--tracker {name}: does not start: {type(error).__name__}: {error}") from error
            self._others.append(tracker)

    def curves(self, values: Mapping[str, float], step: int) -> None:
        """Draw one point on each named curve. The loop only fills a queue, which TensorBoard's thread writes."""
        if self._writer:
            points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            self._writer.file_writer.add_summary(Summary(value=points), step)
        plain = {_NO_NAME.sub("_", name): value for name, value in values.items()}
        self._others_do(lambda tracker: tracker.log(plain, step=step))

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Show a text in TensorBoard; other trackers do not get it."""
        if self._writer:
            self._writer.add_text(tag, markdown, step)

    def rewind(self, step: int) -> None:
        """Delete TensorBoard's points after `step`, or all if `step` is below 0. Other services keep their points."""
        if self._writer:
            self._writer.close()
            for path in self._run_dir.glob("events.out.tfevents.*") if step < 0 else ():
                path.unlink()
            self._writer = _tensorboard(self._run_dir, purge_step=step + 1)

    def flush(self) -> None:
        """Hand TensorBoard's points to the operating system."""
        if self._writer:
            self._writer.flush()

    def close(self) -> None:
        """End every tracker; a second call does nothing."""
        if self._writer:
            self._writer.close()
        self._others_do(lambda tracker: tracker.finish())
        self._writer, self._others = None, []

    def _others_do(self, call: Callable[[GeneralTracker], None]) -> None:
        for tracker in list(self._others):
            try:
                call(tracker)
            except Exception as error:  # noqa: BLE001 - another service's failure must not end the training
                self._others.remove(tracker)
                self._log(f"--tracker {tracker.name}: {type(error).__name__}: {error}; nothing more is sent there")


def _id_in_services(run_dir: Path) -> str:
    """The id of this run in W&B and SwanLab (which wants 21 characters), made at the first start and kept."""
    file = run_dir / "logs" / "tracker-id"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, f"{secrets.token_hex(11)[:21]}\n")
    return file.read_text(encoding="utf-8").strip()


def _tensorboard(run_dir: Path, **settings: Any) -> Any:
    tracker = LOGGER_TYPE_TO_CLASS["tensorboard"]("", run_dir, max_queue=1000, flush_secs=FLUSH_SECONDS, **settings)
    tracker.start()
    return tracker.tracker
