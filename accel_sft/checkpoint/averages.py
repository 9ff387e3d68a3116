"""`Averages`: exponential moving averages of the trained weights (`--ema-decay`), which evaluations and exports use."""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.checkpoint.partition import Partition, flat, partitions


class Averages:
    """Averages of what the optimizer updates, in float32: under ZeRO of its float32 copies, only this rank's part.

    They begin as the first weights. Update number t (from 0) takes min(decay, (1 + t) / (10 + t)) of the averages and
    the rest of the weights, as in TensorFlow's ExponentialMovingAverage: a constant decay of 0.999 would keep 60% of
    the first weights in the averages of a run of 500 steps.

    Attributes:
        updates: number of updates so far; a checkpoint keeps it.
        tensors: the averages, each flat and on the device of its weights, in the order of `partitions`.
    """

    def __init__(self, accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, decay: float) -> None:
        self.accelerator, self.model, self.optimizer, self.decay = accelerator, model, optimizer, decay
        self.updates = 0
        self._stepped = [partition.tensor for partition in partitions(accelerator, model, optimizer)]
        self.tensors = [flat(tensor).to(torch.float32, copy=True) for tensor in self._stepped]
        self._plain: list[torch.Tensor | None] = []

    def update(self) -> None:
        """Take in the current weights; to be called after each optimizer step that has changed them."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        self.updates += 1
        for average, tensor in zip(self.tensors, self._stepped, strict=True):
            average.lerp_(flat(tensor).float(), 1 - decay)

    def put_in(self) -> None:
        """Have the model compute with the averages until `take_out`, which restores every bit; all ranks call it.

        DeepSpeed's float32 copies stay as they are: it copies the averages to the weights of the forwards in their
        place. Elsewhere weights and averages change places, one tensor at a time.
        """
        masters = []
        for partition, average in zip(self._partitions(), self.tensors, strict=True):
            if partition.copied:
                masters.append((partition.tensor, partition.tensor.data))
                partition.tensor.data = average.view_as(partition.tensor)
                self._plain.append(None)
                continue
            weights = flat(partition.tensor)
            plain = weights.clone()
            weights.copy_(average)
            if plain.dtype == average.dtype:  # the average's memory keeps them; weights of 16 bits keep a copy
                average.copy_(plain)
                plain = average
            self._plain.append(plain)
        for master, own in masters:
            master.data = own

    def take_out(self) -> None:
        """Have the model compute with its own weights again."""
        for partition, average, plain in zip(self._partitions(), self.tensors, self._plain, strict=True):
            if plain is not None:
                weights = flat(partition.tensor)
                averaged = weights.clone()
                weights.copy_(plain)
                if plain is average:
                    average.copy_(averaged)
        self._plain.clear()

    def _partitions(self) -> Iterator[Partition]:
        return partitions(self.accelerator, self.model, self.optimizer, writing=True)
