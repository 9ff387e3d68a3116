"""`Checkpoints`: writes a run's checkpoints and best/, each completely or not at all, behind the steps that follow."""

import contextlib
import functools
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.averages import Averages
from accel_sft.checkpoint.capacity import check_disk, no_room, no_room_for_a_copy
from accel_sft.io import manifest
from accel_sft.io.files import begin_folder, put_in_place, read_json, remove, trouble_of_writing, write_atomically
from accel_sft.io.run_dir import RunDir, kept, step_of
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.launch.collectives import by_each_rank, first_reason
from accel_sft.launch.describe import layout_of
from accel_sft.launch.info import Launch

POLL_SECONDS = 0.05
LINGER_SECONDS = 5.0
"""Seconds for which a run that fails lets rank 0 wait for what the other ranks write of a checkpoint."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Writes checkpoints of a model and its optimizer state, one at a time; keeps those of
    `--keep-checkpoints` `keep`.

    `save` copies this rank's part to host memory. A thread then writes the copy, hashes it and, on rank 0, publishes
    the checkpoint once every rank's files are on the disk; it takes part in no collective. The copy's memory is kept
    for the next checkpoint. Where host memory has no room for it, training waits while files are copied and written
    one after the other; `log` is told so. What is exported behind the steps is complete before any later checkpoint is:
    a checkpoint knows the best step.

    Attributes:
        failed: whether this rank could not write; its next `finish` says why, on all ranks.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        launch: Launch,
        model: Any,
        optimizer: Any,
        run_dir: RunDir,
        keep: str,
        averages: Averages | None = None,
        log: Callable[[str], None] = print,
    ) -> None:
        self.accelerator, self.model, self.optimizer, self.averages = accelerator, model, optimizer, averages
        self.launch, self.run_dir, self.keep, self.log = launch, run_dir, keep, log
        self._held: shards.HostCopy | None = None  # the copy; None before the first one, and without room
        self._has_room: bool | None = None  # not known before the first copy
        self._thread: threading.Thread | None = None  # it writes a checkpoint
        self._export: threading.Thread | None = None  # it writes what is exported, on rank 0
        self._written = threading.Event()  # this rank's files are on the disk, or failed; one for each checkpoint
        self._over = threading.Event()  # nobody waits for other ranks' files any more
        self._error: UserError | None = None

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, let what is being written become complete; other ranks may be gone."""
        if kind is not None and self._thread is not None:
            self._written.wait()
            self._thread.join(LINGER_SECONDS)
        if kind is not None and self._export is not None:
            self._export.join()
        self._over.set()

    @property
    def failed(self) -> bool:
        return self._error is not None

    def save(self, state: dict[str, Any], extra: shards.Extra | None = None, *, wait: bool = False) -> Path:
        """Begin the step's checkpoint: the trained parameters, their optimizer state and `state`; all ranks call it.

        Frozen weights are left out, since the run's source has them. There is no random state to save: a step's random
        state is made from the seed, the step and the rank.

        Args:
            state: JSON-able, with the key `step`; it is not changed afterwards.
            extra: further tensors that training needs, equal on all ranks.
            wait: whether to return only when the checkpoint is complete. No memory is taken for a copy then.
        Returns:
            the checkpoint's folder, which is there once it is complete.
        Raises:
            UserError: the disk has no room for it, or the checkpoint before could not be written.
        """
        self._finish_checkpoint()
        accelerator, averages = self.accelerator, self.averages
        target = self.run_dir.checkpoint(state["step"])
        check_disk(accelerator, self.model, self.run_dir, averaged=averages is not None)
        scale = shards.loss_scale(accelerator, self.model)
        about = {**state, "layout": layout_of(accelerator), "loss_scale": scale}
        if averages:
            about["averaged_steps"] = averages.updates
        first = not wait and self._has_room is None
        if first:
            on_gpu = accelerator.device.type == "cuda"
            reason = first_reason(
                no_room_for_a_copy(self.model, self.launch, averaged=averages is not None, on_gpu=on_gpu)
            )
            self._has_room, self._held = reason is None, None if reason else shards.HostCopy()
            if reason:
                self.log(f"{reason}: training waits while checkpoints are written")
        partial = target.with_name(f".{target.name}.partial")
        if accelerator.is_main_process:
            begin_folder(target)
        accelerator.wait_for_everyone()
        self._written = threading.Event()
        pieces = shards.copied(accelerator, self.model, self.optimizer, extra, averages, self._held)
        files: manifest.Entries = {}
        copy: list[shards.Piece] = []
        if self._held is None:
            with self._noting_errors():
                files = shards.write(pieces, partial, accelerator.process_index)
        else:
            copy = list(pieces)
            if first and (reason := first_reason(self._held.refused)):
                self.log(f"host memory cannot be pinned ({reason}): copies of checkpoints take longer")
        write = functools.partial(shards.write, copy)
        arguments = write, files, partial, target, about
        before = self._export.join if self._export else None
        self._thread = _started(before, functools.partial(self._complete, *arguments))
        if wait or self._held is None:
            self.finish()
        return target

    def has_room_for(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether host memory has room for a copy of the `weights` to export, which rank 0 has; all ranks call it."""
        size = sum({id(tensor): tensor.nbytes for tensor in weights.values()}.values())
        main = self.accelerator.is_main_process
        reason = first_reason(no_room(size, "exported weights") if main else None)
        if reason:
            self.log(f"{reason}: training waits while they are written")
        return reason is None

    def export(self, write: Callable[[], None]) -> None:
        """Have `write` make a folder complete behind the next steps; all ranks call it, after `finish_export`. On other
        ranks than 0 it does nothing."""

        def job() -> None:
            with self._noting_errors():
                if not self._error:
                    write()

        # not for the checkpoint to be whole: on rank 0, where other ranks' files never come, `finish_export` would wait
        self._export = _started(self._written.wait if self._thread else None, job)

    def finish_export(self) -> None:
        """Wait until this rank has written what is exported; an error is left to `finish`."""
        if self._export is not None:
            self._export.join()

    def finish(self) -> None:
        """Wait until what was begun is complete; all ranks call it.

        Raises:
            UserError: on all ranks, if it could not be written on one.
        """
        self._finish_checkpoint()
        if self._export is not None:
            self._export.join()
            self._agree()
            self._export = None

    def _finish_checkpoint(self) -> None:
        if self._thread is None:
            return
        self._written.wait()
        self._agree()  # or rank 0 would wait for files that never come
        self._thread.join()
        self._agree()
        self._thread = None

    def _agree(self) -> None:
        def check() -> None:
            if self._error:
                raise self._error

        try:
            by_each_rank(check)
        except UserError:
            self._over.set()
            raise

    @contextlib.contextmanager
    def _noting_errors(self) -> Iterator[None]:
        """Keep an error for `finish`, which raises it on all ranks."""
        try:
            yield
        except Exception as error:  # noqa: BLE001, of whatever kind: it is raised where all ranks can meet it
            trouble = trouble_of_writing(error, self.run_dir.path)
            trouble = trouble or f"a checkpoint cannot be written ({one_line(str(error), LONGEST_ERROR)})"
            self._error = UserError(f"{self.run_dir}: {trouble}, then go on with --resume auto")
            self._error.__cause__ = error

    def _complete(
        self,
        write: Callable[[Path, int], manifest.Entries],
        files: manifest.Entries,
        partial: Path,
        target: Path,
        about: dict[str, Any],
    ) -> None:
        """`write` the copy beside the `files` that are written already; on rank 0, publish the checkpoint once every
        rank has done so. Other ranks leave the sizes and SHA-256 of their files in the folder."""
        rank = self.accelerator.process_index
        with self._noting_errors():
            if not self._error:
                files = {**files, **write(partial, rank)}
                if rank:
                    write_atomically(partial / _record_of(rank), json.dumps(files))
                else:
                    self._written.set()
                    self._publish(files, partial, target, about)
        self._written.set()

    def _publish(self, files: manifest.Entries, partial: Path, target: Path, about: dict[str, Any]) -> None:
        for other in range(1, self.accelerator.num_processes):
            while not (record := partial / _record_of(other)).exists():
                if self._over.wait(POLL_SECONDS):
                    return
            files = {**files, **read_json(record)}
            record.unlink()
        earlier = [path for path in self.run_dir.all_checkpoints() if step_of(path) < about["step"]]
        before = {path.name: manifest.identity(path) for path in earlier}
        stay = kept([*map(step_of, earlier), about["step"]], self.keep)
        manifest.write(partial, {**about, "before": before, "kept": stay}, files)
        put_in_place(partial, target)
        write_atomically(self.run_dir.latest, target.name + "\n")
        # Checkpoints of later steps do not count: they are damaged, or the run was resumed from an earlier one.
        for old in [path for path in earlier if step_of(path) not in stay]:
            remove(old)


def _started(before: Callable[[], object] | None, job: Callable[[], None]) -> threading.Thread:
    """Begin a job behind the steps, once `before` has returned, which waits for the one before it."""

    def run() -> None:
        if before is not None:
            before()
        job()

    thread = threading.Thread(target=run, name="checkpoint", daemon=True)
    thread.start()
    return thread


def _record_of(rank: int) -> str:
    return f"rank-{rank:04d}.json"
