"""Runs a step's forwards and backwards, in smaller forwards after an out-of-memory; sums the step's loss over ranks."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import out_of_memory
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.sequence import SequenceGroup
from accel_sft.chat.encoded import Encoded
from accel_sft.chat.image_inputs import begin_images, pixels_in
from accel_sft.io.files import read_object, write_atomically
from accel_sft.io.heartbeat import exchange
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.collectives import gather_numbers
from accel_sft.launch.groups import shared_rows, tensor_ranks
from accel_sft.tracking.time_spent import BATCHES, COMMUNICATION, FORWARD, span
from accel_sft.training.optimizer import Stepper

Objective = Callable[[torch.nn.Module, Batch, Sequence[Encoded]], torch.Tensor]
"""Maps a model, a forward and its rows to sums over the rows, (n,): first of the loss, then of other numbers."""


def _nll_sum(model: torch.nn.Module, batch: Batch, rows: Sequence[Encoded]) -> torch.Tensor:
    return nll_sum(model, batch)[None]


class OutOfMemory(NamedTuple):
    """An out-of-memory in a forward or backward; all zero if memory sufficed. Ranks exchange these numbers."""

    tokens: int = 0  # tokens of the forward that ran out of memory
    longest: int = 0  # index of the forward's longest training example
    length: int = 0  # tokens of this longest example

    def __str__(self) -> str:
        return (
            f"out of device memory in a forward of {self.tokens:,} tokens; its longest row, training example "
            f"{self.longest}, has {self.length:,} tokens"
        )


class TrainStep:
    """Accumulates the gradients of a step's examples, grouped into forwards by `batching`.

    After an out-of-memory, forwards become smaller. If the step cannot be repeated, a file in `run_dir` records the
    smaller limit for a resumed run. `blank` is passed to `Batching.batch`. `objective` gives a forward's sums: first
    the loss, then other numbers of the step's record.
    """

    def __init__(
        self,
        stepper: Stepper,
        batching: Batching,
        pad_token_id: int,
        run_dir: RunDir,
        log: Callable[[str], None],
        blank: Encoded | None = None,
    ) -> None:
        self.stepper, self.batching = stepper, batching
        self.pad_token_id, self.blank = pad_token_id, blank
        self.run_dir, self.log = run_dir, log
        self.objective: Objective = _nll_sum
        # numbers of tokens, supervised tokens, rows and keys that attention copies without a kernel (`Layout.copied`)
        self.largest_forward = (0, 0, 0, 0)
        self.most_pixels = 0  # most pixel values in one forward
        self._divided: list[list[list[Encoded]]] = []  # the last step's forwards, of every rank
        self._forwards: list[tuple[Any, Any]] = []  # when each of this rank's forwards began and ended
        if most := _most_tokens(run_dir):
            self._limit(most if batching.rows else min(batching.tokens, most))
        self.group = SequenceGroup.of(stepper.accelerator)

    def forward_backward(
        self, examples: list[Encoded], terms: int, step: int, following: Sequence[Encoded] = ()
    ) -> tuple[torch.Tensor, OutOfMemory]:
        """Compute this rank's part of step `step` (from 1): the sums of `objective`, divided by `terms`. Add the
        gradients of the first of them, the loss, to the model.

        Also returns the step's `OutOfMemory`. If memory ran out, gradients are NaN on every rank: call `retry_smaller`
        before the next step. Raises UserError if the step cannot be repeated with smaller forwards.

        Args:
            terms: number of terms of the loss (supervised tokens, or pairs) in the whole step, over all ranks.
            following: rows of the next step, if their images are to be preprocessed during this step.
        """
        accelerator, oom = self.stepper.accelerator, OutOfMemory()
        share, group = torch.zeros(1, device=accelerator.device), self.group
        began, self._forwards = _now(accelerator.device), []
        with span(BATCHES):
            self._divided = self.batching.divide(examples, group.groups)
            forwards = self._divided[group.group]
            upcoming = (
                [*forwards[1:], self.batching.divide(following, group.groups)[group.group][0]] if following else []
            )
        self._note_largest(max(forwards, key=lambda rows: sum(map(_length, rows))))
        for number, rows in enumerate(forwards, 1):
            with shared_rows(), self.stepper.boundary(last=number == len(forwards)):
                sums = None if oom.tokens else self._sums(rows, step)
                if sums is None:
                    # Other ranks exchange gradients in this backward: this rank takes part with one row and a NaN loss.
                    oom = oom if oom.tokens else self._about(rows)
                    sums = self._sums(sorted(rows, key=_length)[:1], step)
                    assert sums is not None  # for one row, _sums raises instead
                    sums = sums * math.nan
                self._forwards.append((began, _now(accelerator.device)))
                if upcoming:
                    begin_images([row.images for row in upcoming.pop(0) if row.images])
                values = sums.detach()
                # factor 1, or NaN if the loss is not finite: NaN makes all gradients NaN on all ranks, so that all skip
                # the step; an infinite loss alone may have finite gradients
                sound = values[0] - values[0] + 1
                loss = sums[0] * (sound * self.stepper.averaged_over / terms)
                try:
                    self.stepper.backward(loss)
                except RuntimeError as error:
                    if not out_of_memory(error):
                        raise
                    if not self.stepper.alone or len(rows) == 1:
                        raise self._unrepeatable(rows, step) from error
                    oom = self._about(rows)
                del sums, loss
            share = share + values
            began = _now(accelerator.device)
        # ranks that compute the same rows each return their part of the loss
        return share / (terms * tensor_ranks(accelerator)), oom

    def retry_smaller(self, oom: OutOfMemory, step: int) -> None:
        """Discard the gradients, and halve the forwards of this and later steps; a step's gradient does not change."""
        self.stepper.discard_gradients()
        self._limit(oom.tokens // 2)
        self.log(
            f"step {step}: {oom}; this step is repeated, and from now on a forward has at most "
            f"{self.batching.tokens:,} tokens"
        )

    def computed(self) -> tuple[int, float]:
        """Tokens and query-key pairs of the last step over all ranks; shared tokens count once, padding never."""
        computed = [self.batching.way.computed(rows) for forwards in self._divided for rows in forwards]
        return sum(tokens for tokens, _ in computed), sum(pairs for _, pairs in computed)

    def forward_seconds(self) -> float:
        """Seconds that this rank's batches and forwards took in the last step; call it after reading the step's loss.
        NaN if forwards wait for other ranks, as backwards do."""
        if not self.stepper.forwards_alone:
            return math.nan
        on_gpu = self.stepper.accelerator.device.type == "cuda"
        return sum(begin.elapsed_time(end) / 1000 if on_gpu else end - begin for begin, end in self._forwards)

    def _note_largest(self, rows: list[Encoded]) -> None:
        supervised = sum(row.supervised_tokens for row in rows)
        way = self.batching.way
        this = way.tokens_in(rows), supervised, len(rows), way.copied_keys(rows)
        self.largest_forward = max(self.largest_forward, this)

    def _limit(self, tokens: int) -> None:
        self.batching = dataclasses.replace(self.batching, rows=None, tokens=tokens)

    def _sums(self, rows: list[Encoded], step: int) -> torch.Tensor | None:
        """The sums of one forward; None after an out-of-memory if the step can be repeated. After this call, no
        reference to a failed forward's tensors is left."""
        try:
            with span(BATCHES):
                batch = self.batching.batch(rows, self.pad_token_id, self.stepper.accelerator.device, self.blank)
                batch = self.group.part(batch, self.pad_token_id)
                self.most_pixels = max(self.most_pixels, pixels_in(batch.inputs))
            with span(FORWARD):
                return self.objective(self.stepper.model, batch, rows)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            if not (self.stepper.forwards_alone and len(rows) > 1):
                raise self._unrepeatable(rows, step) from error
        return None

    def _about(self, rows: list[Encoded]) -> OutOfMemory:
        longest = max(rows, key=_length)
        return OutOfMemory(self.batching.way.tokens_in(rows), longest.index, _length(longest))

    def _unrepeatable(self, rows: list[Encoded], step: int) -> UserError:
        if not rows:
            return UserError(f"step {step}: out of device memory; choose a higher ZeRO stage or --adapter lora")
        oom = self._about(rows)
        fix = "add --gradient-checkpointing, or choose a higher ZeRO stage or --adapter lora"
        if len(rows) > 1:
            most = min(oom.tokens // 2, _most_tokens(self.run_dir) or oom.tokens)
            write_atomically(self.run_dir.most_tokens, json.dumps({"tokens": most}) + "\n")
            fix = f"continue with --resume auto --output-dir {self.run_dir}: forwards will have at most {most:,} tokens"
        return UserError(f"step {step}: {oom}; {fix}")


@exchange()
def reduce_step(
    share: torch.Tensor, oom: OutOfMemory, signal: int, system: list[float], unwritten: bool = False
) -> tuple[list[float], OutOfMemory, int, bool, list[list[float]]]:
    """Combine the ranks' results of a step; every rank gets the same: the sums of the shares; the out-of-memory of the
    smallest forward that ran out; any rank's signal; whether a checkpoint write failed; all system readings."""
    # tolist() waits for this rank's GPU, but for no other rank
    with span(COMMUNICATION):
        every = gather_numbers([signal, *oom, unwritten, *share.tolist(), *system])
    without = [OutOfMemory(*map(int, numbers[1:4])) for numbers in every if numbers[1]]
    signal, unwritten = int(max(numbers[0] for numbers in every)), any(numbers[4] for numbers in every)
    ends = 5 + len(share)
    sums = [sum(numbers) for numbers in zip(*(numbers[5:ends] for numbers in every), strict=True)]
    return sums, min(without, default=OutOfMemory()), signal, unwritten, [numbers[ends:] for numbers in every]


def _now(device: torch.device) -> Any:
    """The current time; on a GPU, an event that records when the GPU has done all earlier work."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _most_tokens(run_dir: RunDir) -> int | None:
    """The token limit recorded after an out-of-memory in an earlier start; None if there was none."""
    limit = read_object(run_dir.most_tokens).get("tokens")
    return limit if isinstance(limit, int) and limit > 0 else None


def _length(row: Encoded) -> int:
    return len(row.input_ids)
