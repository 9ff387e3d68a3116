"""Decides which rows of tokens each optimizer step learns from, by data, seed and global batch size alone."""

import functools
import math
from collections.abc import Sequence

import numpy as np


class StepPlan:
    """A pure function of (data, seed, global batch size): the rows of every optimizer step.

    The rows are read as an endless stream, one permutation per epoch; step k takes the next `global_batch_size` rows,
    across an epoch's end if need be, so each row is seen exactly once per epoch. The last step ends with
    the last epoch. There is no state: a resumed run asks for the next step.

    Args:
        lengths, supervised: number of tokens, and of supervised tokens, of each row; shape (rows,). An example may
            have several rows.
        max_steps: optimizer steps, or None to derive them from `epochs`.
        loss_weights: sum of the weights of each row's supervised tokens; None: their number.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        supervised: Sequence[int] | np.ndarray,
        *,
        seed: int,
        global_batch_size: int,
        epochs: float | None,
        max_steps: int | None,
        loss_weights: np.ndarray | None = None,
    ) -> None:
        self.lengths, self.supervised = np.asarray(lengths), np.asarray(supervised)
        self.loss_weights = self.supervised if loss_weights is None else loss_weights
        self.seed, self.global_batch_size = seed, global_batch_size
        length = round((epochs or 0) * len(self.lengths))
        self.stream_length = length if max_steps is None else None
        self.total_steps = max_steps or max(math.ceil(length / global_batch_size), 1)
        self._permutation = functools.lru_cache(maxsize=2)(self._drawn_permutation)

    def _drawn_permutation(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(len(self.lengths))

    def examples(self, step: int) -> np.ndarray:
        """Return the indices of the rows that step `step` (from 0) learns from; shape (at most global_batch_size,)."""
        begin = step * self.global_batch_size
        end = begin + self.global_batch_size
        if self.stream_length is not None:
            end = max(min(end, self.stream_length), begin + 1)
        positions = np.arange(begin, end)
        epochs, offsets = np.divmod(positions, len(self.lengths))
        return np.concatenate([self._permutation(e)[offsets[epochs == e]] for e in range(epochs[0], epochs[-1] + 1)])

    def seed_of(self, step: int, rank: int) -> int:
        """Return the seed of a rank's random numbers in a step (dropout), so that checkpoints need no random state."""
        return int(np.random.SeedSequence([self.seed, step, rank]).generate_state(1, np.uint64)[0] >> 1)

    def epoch(self, step: int) -> float:
        """Return how many passes over the data `step` steps make; may be a fraction."""
        end = math.inf if self.stream_length is None else self.stream_length
        return min(step * self.global_batch_size, end) / len(self.lengths)

    def ends_epoch(self, step: int) -> bool:
        """Whether step number `step` (from 1) finishes an epoch."""
        return math.floor(self.epoch(step)) > math.floor(self.epoch(step - 1))

    def is_due(self, setting: str, step: int) -> bool:
        """Whether `--eval-every` or `--save-every`, with this value, is due after `step` steps."""
        if setting == "epoch":
            return self.ends_epoch(step)
        every = math.ceil(self.total_steps / 4) if setting == "auto" else int(setting) if setting != "off" else 0
        return every > 0 and step % every == 0
