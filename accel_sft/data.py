"""Which examples make a step, which rank runs them, and how they become tensors (law 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from accel_sft.chat import IGNORED, Encoded

AUTO_MICRO_BATCH_TOKENS = 8192
"""Padded tokens in one forward that `--micro-batch-size auto` aims at."""


class StepPlan:
    """A pure function of (data, seed, global batch size): the examples of every optimizer step.

    The examples are read as an endless stream, one permutation per epoch; step k takes its `global_batch_size` next
    ones, across an epoch's end if need be, so each example is seen exactly once per epoch. The last step ends with the
    last epoch. Nothing here is a state: a resumed run asks for the next step.

    Args:
        lengths, supervised: tokens, and tokens with a loss, of each example; shape (examples,).
        max_steps: optimizer steps, or None to derive them from `epochs`.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        supervised: Sequence[int],
        *,
        seed: int,
        global_batch_size: int,
        epochs: float | None,
        max_steps: int | None,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.supervised = np.asarray(supervised, dtype=np.int64)
        self.seed, self.global_batch_size = seed, global_batch_size
        self.stream_length = round((epochs or 0) * len(self.lengths)) if max_steps is None else None
        self.total_steps = max_steps or max(math.ceil(self.stream_length / global_batch_size), 1)
        self._permutations: dict[int, np.ndarray] = {}

    def _permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._permutations:
            keep = {key: value for key, value in self._permutations.items() if key >= epoch - 1}
            generator = np.random.Generator(np.random.Philox(key=[self.seed, epoch]))
            self._permutations = {**keep, epoch: generator.permutation(len(self.lengths))}
        return self._permutations[epoch]

    def examples(self, step: int) -> np.ndarray:
        """Indices of the examples that step `step` (from 0) learns from; shape (at most global_batch_size,)."""
        begin = step * self.global_batch_size
        end = begin + self.global_batch_size
        if self.stream_length is not None:
            end = max(min(end, self.stream_length), begin + 1)
        positions = np.arange(begin, end)
        epochs, offsets = np.divmod(positions, len(self.lengths))
        return np.array([self._permutation(e)[o] for e, o in zip(epochs, offsets, strict=True)], dtype=np.int64)

    def epoch(self, step: int) -> float:
        """Passes over the data finished when `step` steps are done."""
        end = math.inf if self.stream_length is None else self.stream_length
        return min(step * self.global_batch_size, end) / len(self.lengths)

    def ends_epoch(self, step: int) -> bool:
        """Whether the step after which `step` steps are done is the one that finishes an epoch."""
        return math.floor(self.epoch(step)) > math.floor(self.epoch(step - 1))

    def micro_batches(
        self, step: int, *, rank: int, world_size: int, micro_batch_size: int
    ) -> tuple[list[np.ndarray], int]:
        """This rank's forwards of a step, and N, the supervised tokens of the whole step over all ranks.

        Examples are dealt to ranks longest first, back and forth, so that ranks carry near-equal tokens; each rank
        splits its own into the same number of micro-batches (some may be empty: they still run, for the collectives).
        """
        chosen = self.examples(step)
        chosen = chosen[np.argsort(-self.lengths[chosen], kind="stable")]
        turn = np.arange(len(chosen)) % (2 * world_size)
        mine = chosen[np.where(turn < world_size, turn, 2 * world_size - 1 - turn) == rank]
        count = math.ceil(math.ceil(len(chosen) / world_size) / micro_batch_size)
        return np.array_split(mine, count), int(self.supervised[chosen].sum())


def micro_batch_examples(setting: str, longest: int, global_batch_size: int, world_size: int) -> int:
    """`--micro-batch-size` as a number: the one given, or as many of the longest examples as fit the token budget."""
    share = math.ceil(global_batch_size / world_size)
    if setting != "auto":
        return min(int(setting), share)
    return max(1, min(share, AUTO_MICRO_BATCH_TOKENS // longest))


def collate(examples: Sequence[Encoded], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Right-padded `input_ids`, `attention_mask` and `labels`, each (examples, longest); no example: one masked row.

    Labels are set by position, so a pad token that equals the end-of-turn token is neither learnt nor the reverse.
    """
    longest = max((len(example.input_ids) for example in examples), default=2)
    shape = (max(len(examples), 1), longest)
    input_ids = np.full(shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(shape, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    for row, example in enumerate(examples):
        length, prompt_length = len(example.input_ids), example.prompt_length
        input_ids[row, :length] = example.input_ids
        attention_mask[row, :length] = 1
        labels[row, prompt_length:length] = example.input_ids[prompt_length:]
    if not examples:
        attention_mask[:] = 1
    arrays = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels}
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
