"""Runs trial forwards and backwards before the first step, to choose a layout and a size of forwards."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.config import TrainConfig
from accel_sft.batching.collate import Batch
from accel_sft.batching.layouts import Batching
from accel_sft.batching.loss import nll_sum
from accel_sft.chat.encoded import Encoded
from accel_sft.memory.estimate import CUDA_BYTES
from accel_sft.memory.job import Job
from accel_sft.memory.states import update_bytes


@dataclasses.dataclass(frozen=True)
class Trial:
    """A prepared model, and examples (the same on every rank) on which each `Batching` is tried.

    Attributes:
        train: whether forwards use dropout and are followed by a backward.
        job: the run as `plan` describes it; None if the model's parameters cannot be counted.
    """

    accelerator: Accelerator
    model: torch.nn.Module
    config: TrainConfig
    examples: Sequence[Encoded]
    pad_token_id: int
    train: bool = True
    blank: Encoded | None = None
    job: Job | None = None

    @property
    def in_float32(self) -> bool:
        """Whether the model computes in float32."""
        return self.accelerator.mixed_precision == "no" and self.config.dtype in ("auto", "float32")

    def batch(self, batching: Batching, rows: Sequence[Encoded]) -> Batch:
        """Return the tensors of one forward of these rows, on this rank's device."""
        return batching.batch(rows, self.pad_token_id, self.accelerator.device, self.blank)

    def spread(self) -> Sequence[Encoded]:
        """Return as many examples as a step has, evenly spread over the data."""
        count = self.config.global_batch_size or len(self.examples)
        return self.examples[:: max(len(self.examples) // count, 1)][:count]

    def reserved(self) -> int:
        """Bytes, without activations, that the first update will still allocate on this rank's device."""
        if not (self.train and self.job):
            return 0
        size = update_bytes(self.job)
        if self.job.train_only is not None:  # the job counts all weights as trained
            trained = sum(getattr(p, "ds_numel", p.numel()) for p in self.model.parameters() if p.requires_grad)
            size *= trained / self.job.trained
        return int(size) + (CUDA_BYTES if self.accelerator.device.type == "cuda" else 0)

    def run(
        self, batching: Batching, rows: Sequence[Encoded], also: Sequence[torch.Tensor] = ()
    ) -> tuple[float, list[torch.Tensor]]:
        """Run one forward and, if `train`, a backward. Nothing else changes: the wrappers' hooks do not run, and no
        weight gets a `.grad`. Returns the sum of the tokens' losses in nats and, if `train`, the gradients of the
        embedded tokens and of those weights in `also` that the loss depends on."""
        model = self.accelerator.unwrap_model(self.model)
        embedded: list[torch.Tensor] = []

        def cut_off(_: Any, __: Any, out: torch.Tensor) -> torch.Tensor:
            embedded.append(out.detach().requires_grad_())
            return embedded[-1]

        handle = model.get_input_embeddings().register_forward_hook(cut_off)
        was_training = model.training
        gradients: Sequence[torch.Tensor] = ()
        model.train(self.train)  # gradient checkpointing is on only in training mode
        try:
            with torch.random.fork_rng(), torch.set_grad_enabled(self.train):
                loss = nll_sum(model, self.batch(batching, rows))
                if self.train:
                    gradients = torch.autograd.grad(loss, [*embedded, *also], allow_unused=bool(also))
            return loss.item(), [gradient for gradient in gradients if gradient is not None]
        finally:
            handle.remove()
            model.train(was_training)
