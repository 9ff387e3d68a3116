"""The model and the examples on which batchings are tried before the first step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import Batch
from accel_sft.batching.device_memory import first_update_bytes
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.encoding import Encoded


@dataclasses.dataclass(frozen=True)
class Trial:
    """A prepared model and examples on which batchings are tried, the same on every rank.

    Attributes:
        train: whether a backward follows each forward, and dropout will be on.
        moments: whether AdamW's moments are allocated already, as in a resumed run.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    config: TrainConfig
    examples: Sequence[Encoded]
    pad_token_id: int
    train: bool = True
    moments: bool = False

    @property
    def in_float32(self) -> bool:
        """Whether the model computes in float32."""
        return self.accelerator.mixed_precision == "no" and self.config.dtype in ("auto", "float32")

    def batch(self, batching: Batching, rows: Sequence[Encoded]) -> Batch:
        """One forward on this rank's device."""
        return batching.batch(rows, self.pad_token_id, self.accelerator.device)

    def spread(self) -> Sequence[Encoded]:
        """Examples evenly spread over the data, as many as a step has."""
        count = self.config.global_batch_size or len(self.examples)
        return self.examples[:: max(len(self.examples) // count, 1)][:count]

    def reserved(self) -> int:
        """Bytes that training will take on this rank's device besides activations."""
        return first_update_bytes(self.accelerator, self.model, moments=self.moments) if self.train else 0

    def run(
        self, batching: Batching, rows: Sequence[Encoded], also: Sequence[torch.Tensor] = ()
    ) -> tuple[float, list[torch.Tensor]]:
        """Run one forward and, in training, a backward through all but the weights, and wait until the device is done.

        The model runs without its wrappers, and no gradient is added to a weight: what exchanges or divides gradients
        between ranks must not see this backward. Random state and mode are put back.

        Args:
            also: weights whose gradients are computed, too.
        Returns:
            the sum of the tokens' losses, in nats; and the gradients: first the embedded tokens', then those of `also`
            that the loss depends on; none outside of training.
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
