"""Which sizes of a forward a device has room for beside the optimizer's state: tried there and back, or estimated."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from accel_sft.api.errors import UserError
from accel_sft.batching.device_memory import LEFT_FREE, expected_bytes, first_update_bytes, free_bytes, out_of_memory
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.batching.verify import Subject
from accel_sft.chat.encoding import Encoded
from accel_sft.launch.collectives import all_ranks, largest_of_ranks

RESERVED_PART = 2**28
"""Bytes reserved in one piece at most."""


class Room(Subject):
    """Tries forwards of this model; all ranks together, and all come to the same answer."""

    def within_memory(self, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
        """Batchings that fit through forward and backward beside the optimizer's state, on all ranks.

        Sizes are tried upwards until one does not fit, or takes in a rank's part of a step: the longest examples
        together, or the forward with most tokens of a usual step.
        """
        fitting = []
        by_length = sorted(self.examples, key=lambda example: -len(example.input_ids))
        step = self.config.global_batch_size or len(by_length)
        longest_first = by_length[: math.ceil(step / self.accelerator.num_processes)]
        for batching in exact:
            for tokens in sizes:
                sized = dataclasses.replace(batching, tokens=tokens)
                rows = longest_first[: _most_rows(sized, longest_first)]
                usual = sized.divide(self.spread(), self.accelerator.num_processes)
                most = max(rows, *itertools.chain(*usual), key=sized.way.tokens_in)
                if not all_ranks(self._fits(sized, most)):
                    break
                fitting.append(sized)
                if len(rows) == len(longest_first):
                    break
        if not fitting:
            longest = longest_first[0]
            raise UserError(
                f"out of device memory: not even {sizes[0]:,} tokens fit through forward and backward "
                f"(the longest example, {longest.index}, has {len(longest.input_ids):,}); "
                "add --gradient-checkpointing, lower --max-length, or choose a higher ZeRO stage or --adapter lora"
            )
        return fitting

    def spread(self) -> Sequence[Encoded]:
        """Examples from all over the data, as many as a step has."""
        count = self.config.global_batch_size or len(self.examples)
        return self.examples[:: max(len(self.examples) // count, 1)][:count]

    def expected_to_fit(self, exact: Sequence[Batching], sizes: Sequence[int]) -> list[Batching]:
        """Those of these sizes that fit by their estimate beside the optimizer's state on all ranks; the smallest in
        any case."""
        base = self.accelerator.unwrap_model(self.model)
        room = (1 - LEFT_FREE) * (free_bytes(self.accelerator.device) - self.reserved())
        room = -largest_of_ranks(-room)
        how = {"recomputed": self.config.gradient_checkpointing, "itemsize": self._itemsize()}
        sized = [dataclasses.replace(batching, tokens=tokens) for batching in exact for tokens in sizes]
        fitting = [batching for batching in sized if expected_bytes(base, batching, **how) <= room]
        return fitting or [batching for batching in sized if batching.tokens == sizes[0]]

    def reserved(self) -> int:
        """Bytes that training will take on this rank's device besides activations."""
        return first_update_bytes(self.accelerator, self.model, moments=self.moments) if self.train else 0

    def run(
        self, batching: Batching, rows: Sequence[Encoded], also: Sequence[torch.Tensor] = ()
    ) -> tuple[float, list[torch.Tensor]]:
        """One forward and, in training, a backward through all but the weights, until the device is done.

        The model runs outside what wraps it, and gradients are added to no weight: what exchanges or divides them
        between ranks must not see this backward. Random state and mode are put back.

        Args:
            also: weights whose gradients are computed besides.
        Returns:
            the sum of the tokens' losses, in nats; and the gradients, of the embedded tokens first, empty if not in
            training, without those of `also` that the loss does not depend on.
        """
        model = self.accelerator.unwrap_model(self.model)
        embedded: list[torch.Tensor] = []
        handle = model.get_input_embeddings().register_forward_hook(
            lambda _, __, out: embedded.append(out.detach().requires_grad_()) or embedded[-1]
        )
        was_training, gradients = model.training, ()
        model.train(self.train)  # activations are recomputed in training only
        try:
            with torch.random.fork_rng(), torch.set_grad_enabled(self.train):
                loss = nll_sum(model, self.batch(batching, rows))
                if self.train:
                    gradients = torch.autograd.grad(loss, [*embedded, *also], allow_unused=bool(also))
            return loss.item(), [each for each in gradients if each is not None]
        finally:
            handle.remove()
            model.train(was_training)

    def _fits(self, batching: Batching, rows: list[Encoded]) -> bool:
        """Whether `run` fits into this rank's memory beside what the first update will allocate."""
        hold: list[torch.Tensor] = []
        try:
            if self.train:
                self._reserve(hold)
            self.run(batching, rows)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            return False
        finally:
            hold.clear()
            if self.accelerator.device.type == "cuda":
                torch.cuda.empty_cache()
        return True

    def _reserve(self, hold: list[torch.Tensor]) -> None:
        """Allocate what training will, besides activations; in parts, which the allocator's gaps may take."""
        size = self.reserved()
        while size > 0:
            part = min(size, RESERVED_PART)
            hold.append(torch.empty(part, dtype=torch.uint8, device=self.accelerator.device))
            size -= part

    def _itemsize(self) -> int:
        """Bytes of a number that computes."""
        if self.accelerator.mixed_precision != "no":
            return 2
        return next(self.model.parameters()).element_size()


def _most_rows(batching: Batching, rows: list[Encoded]) -> int:
    """How many of these rows, in this order, one forward takes; at least one."""
    counts = range(2, len(rows) + 1)
    return 1 + bisect.bisect_left(counts, True, key=lambda count: len(batching.divide(rows[:count], 1)[0]) > 1)
