"""What one step learns: the gradients of its examples, over forwards that fit into the device's memory (law 1)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from accel_sft.batching import Batching
from accel_sft.chat import Encoded
from accel_sft.loss import nll_sum
from accel_sft.optim import Stepper
from accel_sft.options import UserError


class Learner:
    """Adds up the gradients of a step's examples.

    Attributes:
        batching: how they are laid out; smaller forwards after one that found no room.

    Args:
        run_dir: the run to go on with, where an error says how.
        say: tells a line.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        stepper: Stepper,
        batching: Batching,
        pad_token_id: int,
        run_dir: Path,
        say: Callable[[str], None],
    ) -> None:
        self.accelerator, self.model, self.stepper, self.batching = accelerator, model, stepper, batching
        self.pad_token_id, self.run_dir, self.say = pad_token_id, run_dir, say

    def learn(self, examples: list[Encoded], supervised_tokens: int, step: int) -> torch.Tensor:
        """This rank's part of the step's loss, shape (); its gradients are added to the model's.

        Args:
            supervised_tokens: of the whole step, over all ranks.
            step: from 1, for messages.
        Raises:
            UserError: out of device memory, and the step cannot be repeated with smaller forwards.
        """
        while True:
            rows: list[Encoded] = []
            try:
                share = torch.zeros((), device=self.accelerator.device)
                ranks = self.accelerator.num_processes
                forwards = self.batching.divide(examples, ranks)[self.accelerator.process_index]
                for number, rows in enumerate(forwards, 1):
                    batch = self.batching.batch(rows, self.pad_token_id, self.accelerator.device)
                    with self.stepper.boundary(last=number == len(forwards)):
                        nll = nll_sum(self.model, batch)
                        value = nll.detach()
                        # 1, or not a number: a loss that is none makes every gradient none, on all ranks, and such
                        # gradients are not learnt from; by itself an infinite loss may have finite ones
                        sound = value - value + 1
                        self.stepper.backward(nll * (sound * ranks / supervised_tokens))  # gradients are averaged
                    share += value
                return share / supervised_tokens
            except torch.OutOfMemoryError as error:
                smaller = self._smaller(rows, step, error)
            self.stepper.forget()  # behind `except`, which holds the tensors of the forward that failed
            self.batching = smaller

    def _smaller(self, rows: list[Encoded], step: int, error: torch.OutOfMemoryError) -> Batching:
        """Forwards of half the size from here on: the same mathematics, unless other ranks wait for this one."""
        if not rows:
            raise error
        tokens, longest = self.batching.tokens_in(rows), max(rows, key=lambda row: len(row.input_ids))
        what = (
            f"step {step}: out of device memory in a forward of {len(rows)} examples, {tokens:,} tokens; the longest, "
            f"training example {longest.index}, has {len(longest.input_ids):,}"
        )
        if len(rows) > 1 and self.stepper.can_forget:
            self.say(f"{what}; the step is repeated with at most {tokens // 2:,} tokens a forward, as are the next")
            return dataclasses.replace(self.batching, rows=None, tokens=tokens // 2)
        mend = "add --gradient-checkpointing, or choose a higher ZeRO stage or --adapter lora"
        if len(rows) > 1:
            mend = f"go on with --resume auto --output-dir {self.run_dir} --micro-batch-size {len(rows) // 2}"
        raise UserError(f"{what}; {mend}") from error
