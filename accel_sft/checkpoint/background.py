"""`Checkpoints`: writes a run's checkpoints and best/, each completely or not at all, while the next steps run."""

import collections
import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.shards import Averages
from accel_sft.io import manifest
from accel_sft.io.files import begin_folder, put_in_place, read_json, remove, trouble_of_writing, write_atomically
from accel_sft.io.run_dir import RunDir, kept_steps, step_of
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.launch import host_memory
from accel_sft.launch.collectives import by_each_rank, decided_by_main, first_reason
from accel_sft.launch.describe import layout_of
from accel_sft.launch.info import Launch
from accel_sft.memory.estimate import checkpoint_bytes_each
from accel_sft.memory.job import pinned
from accel_sft.memory.states import FLOAT32

Result = TypeVar("Result")

POLL_SECONDS = 0.05
LINGER_SECONDS = 5.0
"""Seconds that rank 0 of a failing run waits for other ranks' checkpoint files."""
MOST_SPARE_BYTES = 64 << 20
"""Maximum number of bytes that must stay free on the disk for a run's other files. For a small checkpoint, a third of
its size is enough: exported weights are about that large."""


class Checkpoints(contextlib.AbstractContextManager["Checkpoints"]):
    """Writes checkpoints of a model and its optimizer state, one at a time; `keep` is `--keep-checkpoints`.

    `save` copies this rank's part to host memory, which the next checkpoint reuses. A worker thread writes and hashes
    the copy. On rank 0, the thread also publishes the checkpoint once every rank's files are on the disk. The thread
    calls no collective. If host memory has no room for the copy, a line is logged, and training waits while files are
    copied and written one by one. Jobs run in order, so an export (best/) is complete before the next checkpoint.
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
        self._has_room: bool | None = None  # whether a copy fits; None before the first checkpoint
        self._memory: shards.HostCopy | None = None
        self._worker = futures.ThreadPoolExecutor(1, "checkpoint")
        self._export: Future[None] | None = None
        self._written: Future[manifest.Entries] | None = None  # this rank's files of the checkpoint
        self._published: Future[None] | None = None
        self._given_up = threading.Event()  # set when rank 0 stops waiting for other ranks' files

    def __exit__(self, kind: object, *_: object) -> None:
        """After an error, finish this rank's current writes without other ranks, which may be gone."""
        if kind is not None:
            futures.wait([job for job in self._begun if job is not self._published])
            futures.wait(self._begun, LINGER_SECONDS)
        self._given_up.set()
        self._worker.shutdown(wait=False)

    @property
    def failed(self) -> bool:
        """Whether a write of this rank has failed; `finish` then raises the error on all ranks."""
        return any(job.done() and job.exception() for job in self._begun)

    @property
    def _begun(self) -> list[Future[Any]]:
        return [job for job in (self._export, self._written, self._published) if job]

    def save(self, state: dict[str, Any], extra: shards.Extra | None = None, *, wait: bool = False) -> Path:
        """Begin a step's checkpoint of the trained parameters, their optimizer state and `state`; all ranks call this.

        The random state of a step is computed from seed, step and rank, so it is not saved. `state` is a JSON object
        with the key `step`, and must not change after the call; `extra` are further tensors, equal on all ranks. With
        `wait`, the checkpoint is complete when the call returns, and no new host memory is used for a whole copy.
        """
        self._finish_checkpoint()
        accelerator, averages = self.accelerator, self.averages
        target = self.run_dir.checkpoint(state["step"])
        check_disk(accelerator, self.model, self.run_dir, averaged=averages is not None)
        scale = shards.loss_scale(accelerator, self.model)
        about = {**state, "layout": layout_of(accelerator), "loss_scale": scale}
        if averages:
            about["averaged_steps"] = averages.updates
        first = self._has_room is None and not wait
        if first:
            on_gpu = accelerator.device.type == "cuda"
            size = copy_bytes(self.model, self.launch, averaged=averages is not None, on_gpu=on_gpu)
            self._has_room = self._room_for(size, "a checkpoint")
            self._memory = shards.HostCopy() if self._has_room else None
        partial = target.with_name(f".{target.name}.partial")
        if accelerator.is_main_process:
            begin_folder(target)
        accelerator.wait_for_everyone()
        pieces = shards.copied(accelerator, self.model, self.optimizer, extra, averages, self._memory)
        write = functools.partial(shards.write, folder=partial, rank=accelerator.process_index)
        if self._memory is None:
            self._written = self._done(self._write, write, pieces, partial)
            collections.deque(pieces, maxlen=0)  # even after an error, because making the pieces is a collective
        else:
            self._written = self._submit(self._write, write, [*pieces], partial)
            if first and (reason := first_reason(self._memory.refused)):
                self.log(f"host memory cannot be pinned ({reason}): copies of checkpoints take longer")
        self._published = self._submit(self._publish, self._written, partial, target, about)
        if wait or self._memory is None:
            self.finish()
        return target

    def has_room_for(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Whether host memory has room for a copy of rank 0's `weights` to export; all ranks call this."""
        size = sum({id(tensor): tensor.nbytes for tensor in weights.values()}.values())
        return self._room_for(size if self.accelerator.is_main_process else 0, "exported weights")

    def _room_for(self, size: float, contents: str) -> bool:
        """Whether every rank's host memory has room for this copy plus a third of the copy's size."""
        free, reason = host_memory.free_bytes(), None
        if free < size * 4 / 3:
            reason = f"host memory: a copy of {contents} takes {_shown(size)}, but only {_shown(free)} are free"
        if reason := first_reason(reason):
            self.log(f"{reason}; training waits for each write")
        return reason is None

    def export(self, write: Callable[[], None] | None) -> None:
        """Run `write`, which makes a complete folder, in the background; all ranks call this, after `finish`."""
        self._export = self._submit(write or (lambda: None))

    def finish(self) -> None:
        """Wait until all begun writes are complete; all ranks call this, and all raise if a rank could not write."""
        self._finish_checkpoint()
        self._agree(self._export)
        self._export = None

    def _finish_checkpoint(self) -> None:
        self._agree(self._written)  # first, because rank 0 would wait for a failed rank's files
        self._agree(self._published)
        self._written = self._published = None

    def _agree(self, job: Future[Any] | None) -> None:
        """Wait for this rank's job; all ranks raise if one rank's job has failed."""
        if job is None:  # then no rank has a job
            return
        try:
            by_each_rank(job.result)
        except UserError:
            self._given_up.set()
            raise

    def _submit(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        return self._worker.submit(self._explained, work, *arguments)

    def _done(self, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """Do the work in this thread. `finish` raises its errors, as it raises those of the worker thread."""
        job = Future[Result]()
        try:
            job.set_result(self._explained(work, *arguments))
        except UserError as error:
            job.set_exception(error)
        return job

    def _explained(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Do the work; an error of any kind becomes a UserError, which all ranks can raise."""
        try:
            return work(*arguments)
        except UserError:
            raise
        except Exception as error:
            trouble = trouble_of_writing(error, self.run_dir.path)
            trouble = trouble or f"a checkpoint cannot be written ({one_line(str(error), LONGEST_ERROR)}); fix this"
            raise UserError(f"{self.run_dir}: {trouble}, then go on with --resume auto") from error

    def _write(
        self, write: Callable[..., manifest.Entries], pieces: Iterable[shards.Piece], partial: Path
    ) -> manifest.Entries:
        """Write this rank's files, after any export. For rank 0, other ranks list their files' sizes and SHA-256."""
        if self._export is not None:
            self._export.result()
        files = write(pieces)
        if rank := self.accelerator.process_index:
            write_atomically(partial / _record_of(rank), json.dumps(files))
        return files

    def _publish(self, written: Future[manifest.Entries], partial: Path, target: Path, about: dict[str, Any]) -> None:
        """On rank 0, put the checkpoint in place once every rank's files are on the disk."""
        files = written.result()
        if not self.accelerator.is_main_process:
            return
        for rank in range(1, self.accelerator.num_processes):
            while not (record := partial / _record_of(rank)).exists():
                if self._given_up.wait(POLL_SECONDS):
                    return
            files = {**files, **read_json(record)}
            record.unlink()
        earlier = [path for path in self.run_dir.all_checkpoints() if step_of(path) < about["step"]]
        before = {path.name: manifest.identity(path) for path in earlier}
        stay = kept_steps([*map(step_of, earlier), about["step"]], self.keep)
        manifest.write(partial, {**about, "before": before, "kept": stay}, files)
        put_in_place(partial, target)
        write_atomically(self.run_dir.latest, target.name + "\n")
        # later steps' checkpoints do not count: they are damaged, or the run was resumed from an earlier step
        for old in [path for path in earlier if step_of(path) not in stay]:
            remove(old)


def check_disk(
    accelerator: Accelerator, model: Any, run_dir: RunDir, *, averaged: bool = False, checkpoints: int = 1
) -> None:
    """Raise UserError on every rank if `checkpoints` further checkpoints do not fit on the disk."""

    def check() -> None:
        size, free = checkpoint_bytes(model, averaged=averaged), shutil.disk_usage(run_dir.path).free
        if free < size * checkpoints + (spare := min(size // 3, MOST_SPARE_BYTES)):
            needs = f"checkpoints need {checkpoints} x {_shown(size)}, and other files {_shown(spare)}"
            fix = "Delete files (then --resume auto), or lower --keep-checkpoints."
            raise UserError(f"{run_dir}: {needs}, but only {_shown(free)} are free. {fix}")

    decided_by_main(accelerator, check)  # other machines may not see the folder yet


def checkpoint_bytes(model: Any, *, averaged: bool = False, in_pinned_memory: bool = False) -> int:
    """Return the maximum size in bytes of this model's checkpoint, over all ranks. With `in_pinned_memory`, this is the
    size in host memory, where pinning rounds up the size of each tensor."""
    sizes: list[float] = [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]
    if in_pinned_memory:
        sizes = [pinned(FLOAT32 * size) / FLOAT32 for size in sizes]
    return int(sum(sizes)) * checkpoint_bytes_each(averaged)


def copy_bytes(model: Any, launch: Launch, *, averaged: bool, on_gpu: bool) -> float:
    """Return how many bytes this machine's ranks copy to host memory for a checkpoint."""
    ranks = launch.shard_ranks if launch.backend == "fsdp" else launch.world_size
    pins = on_gpu and launch.offload("optimizer") == "none"
    size = checkpoint_bytes(model, averaged=averaged, in_pinned_memory=pins)
    return size * min(launch.local_world_size / ranks, 1.0)


def _shown(size: float) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _record_of(rank: int) -> str:
    return f"rank-{rank:04d}.json"
