"""What one step learns: the gradients of its examples, over forwards that fit into the device's memory (law 1)."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.data.chat import Encoded
from accel_sft.io.files import write_atomically
from accel_sft.launch.collectives import gather_numbers
from accel_sft.training.optimizer import Stepper

CAP_FILE = "most-tokens.json"
"""In a run's folder, where a forward found no room and the step could not be repeated: what a resumed run keeps to."""


class OutOfMemory(NamedTuple):
    """A forward that the device had no memory for; all zero: there was none. Numbers, so that ranks can exchange it.

    Attributes:
        tokens: that it would have computed.
        longest, length: index and tokens of its longest training example.
    """

    tokens: int = 0
    longest: int = 0
    length: int = 0

    def __str__(self) -> str:
        return (
            f"out of device memory in a forward of {self.tokens:,} tokens; the longest of its rows, training example "
            f"{self.longest}, has {self.length:,}"
        )


class TrainStep:
    """Adds up the gradients of a step's examples.

    Attributes:
        batching: how they are laid out; smaller forwards after one that found no room.

    Args:
        run_dir: the run to go on with, where an error says how.
        log: tells a line.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        stepper: Stepper,
        batching: Batching,
        pad_token_id: int,
        run_dir: Path,
        log: Callable[[str], None],
    ) -> None:
        self.accelerator, self.model, self.stepper = accelerator, model, stepper
        self.pad_token_id, self.run_dir, self.log = pad_token_id, run_dir, log
        if most := _most_tokens(run_dir):
            batching = _at_most(batching, most if batching.rows else min(batching.tokens, most))
        self.batching = batching

    def forward_backward(
        self, examples: list[Encoded], supervised_tokens: int, step: int
    ) -> tuple[torch.Tensor, OutOfMemory]:
        """This rank's part of the step's loss, shape (), its gradients being added to the model's; and where it found
        no room.

        Args:
            supervised_tokens: of the whole step, over all ranks.
            step: from 1, for messages.
        Raises:
            UserError: out of device memory, and the step cannot be repeated with smaller forwards.
        """
        share = torch.zeros((), device=self.accelerator.device)
        ranks, oom = self.accelerator.num_processes, OutOfMemory()
        forwards = self.batching.divide(examples, ranks)[self.accelerator.process_index]
        for number, rows in enumerate(forwards, 1):
            with self.stepper.boundary(last=number == len(forwards)):
                nll = None if oom.tokens else self._nll(rows, step)
                if nll is None:
                    # Other ranks exchange gradients in this backward: one row takes part in it, with what is no number.
                    oom = oom if oom.tokens else self._about(rows)
                    nll = self._nll(sorted(rows, key=_length)[:1], step, repeatable=False) * math.nan
                value = nll.detach()
                # 1, or not a number: a loss that is none makes every gradient none, on all ranks, and such
                # gradients are not learnt from; by itself an infinite loss may have finite ones
                sound = value - value + 1
                loss = nll * (sound * ranks / supervised_tokens)  # gradients are averaged
                try:
                    self.stepper.backward(loss)
                except torch.OutOfMemoryError as error:
                    if not self.stepper.alone or len(rows) == 1:
                        raise self._unrepeatable(rows, step) from error
                    oom = self._about(rows)
                del nll, loss
            share += value
        return share / supervised_tokens, oom

    def retry_smaller(self, oom: OutOfMemory, step: int) -> None:
        """Have the step repeated, and the next ones done, in forwards of half the size: the same mathematics."""
        self.stepper.discard_gradients()
        self.batching = _at_most(self.batching, oom.tokens // 2)
        self.log(
            f"step {step}: {oom}; the step is repeated with at most {self.batching.tokens:,} tokens a forward, "
            "as are the next"
        )

    def _nll(self, rows: list[Encoded], step: int, repeatable: bool = True) -> torch.Tensor | None:
        """Of one forward; None where it found no room, and the step can be repeated. Behind this function nothing holds
        the tensors of a forward that failed."""
        try:
            return nll_sum(self.model, self.batching.batch(rows, self.pad_token_id, self.accelerator.device))
        except torch.OutOfMemoryError as error:
            if not (repeatable and self.stepper.forwards_alone and len(rows) > 1):
                raise self._unrepeatable(rows, step) from error
        return None

    def _about(self, rows: list[Encoded]) -> OutOfMemory:
        longest = max(rows, key=_length)
        return OutOfMemory(self.batching.tokens_in(rows), longest.index, _length(longest))

    def _unrepeatable(self, rows: list[Encoded], step: int) -> UserError:
        if not rows:
            return UserError(f"step {step}: out of device memory; choose a higher ZeRO stage or --adapter lora")
        oom = self._about(rows)
        mend = "add --gradient-checkpointing, or choose a higher ZeRO stage or --adapter lora"
        if len(rows) > 1:
            most = min(oom.tokens // 2, _most_tokens(self.run_dir) or oom.tokens)
            write_atomically(self.run_dir / CAP_FILE, json.dumps({"tokens": most}) + "\n")
            mend = f"go on with --resume auto --output-dir {self.run_dir}: it keeps to {most:,} tokens a forward"
        return UserError(f"step {step}: {oom}; {mend}")


def reduce_step(
    accelerator: Accelerator, share: torch.Tensor, oom: OutOfMemory, signal: int, system: list[float]
) -> tuple[float, OutOfMemory, int, list[list[float]]]:
    """What every rank knows after a step's backwards: its loss, summed over ranks; a forward that found no room on one
    of them; a signal that one of them got; and all ranks' system readings."""
    if accelerator.num_processes == 1:
        return share.item(), oom, signal, [system]
    every = gather_numbers([share.item(), signal, *oom, *system])
    without = [OutOfMemory(*map(int, numbers[2:5])) for numbers in every if numbers[2]]
    loss, signal = sum(numbers[0] for numbers in every), int(max(numbers[1] for numbers in every))
    return loss, min(without, default=OutOfMemory()), signal, [numbers[5:] for numbers in every]


def _most_tokens(run_dir: Path) -> int | None:
    """What a run that ended for want of memory left for the next; None: nothing."""
    file = run_dir / CAP_FILE
    return json.loads(file.read_text(encoding="utf-8"))["tokens"] if file.exists() else None


def _at_most(batching: Batching, tokens: int) -> Batching:
    return dataclasses.replace(batching, rows=None, tokens=tokens)


def _length(row: Encoded) -> int:
    return len(row.input_ids)
