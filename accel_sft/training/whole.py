"""Hands out trained weights and their gradients, whole and equal on all ranks, also where a backend has parts."""

from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_sft.checkpoint.partition import Partition, flat, partitions
from accel_sft.checkpoint.shards import loss_scale


class Whole:
    """The trained weights with a certain part in their names, around one update. Its methods are collective.

    DeepSpeed and FSDP2 keep parts of weights and gradients, and DeepSpeed frees gradients in the update; what is
    returned and changed here are copies then.
    """

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, part: str, of_gradients: bool) -> None:
        self.backend = accelerator, model, optimizer
        self.kind = accelerator.distributed_type
        named = accelerator.unwrap_model(model).named_parameters()
        self.parameters = {name: weight for name, weight in named if weight.requires_grad and part in name}
        self.of_gradients = of_gradients
        self.in_parts = self.kind in (DistributedType.DEEPSPEED, DistributedType.FSDP)
        self.gradients: dict[str, torch.Tensor] = {}
        self.copies: dict[str, torch.Tensor] = {}

    def keep_gradients(self) -> None:
        """Copy the gradients in float32, between backward and update, if they will be read."""
        if not self.of_gradients:
            return
        if self.kind == DistributedType.FSDP:
            self.gradients = self._gathered(lambda partition: partition.tensor.grad)
        elif self.kind == DistributedType.DEEPSPEED:
            from deepspeed.utils import safe_get_full_grad

            scale = loss_scale(*self.backend[:2]).get("cur_scale", 1.0)
            for name, parameter in self.parameters.items():  # at stage 0 these are the gradients themselves
                self.gradients[name] = safe_get_full_grad(parameter).to(torch.float32, copy=True).div_(scale)

    def weights(self, clipped: float) -> dict[str, torch.Tensor]:
        """Return the updated weights, in float32 if the optimizer has them so.

        Args:
            clipped: what the update multiplied the gradients with that `keep_gradients` found.
        """
        if not self.in_parts:
            return self.parameters
        self.copies = self._gathered(lambda partition: partition.tensor)
        for name, gradient in self.gradients.items():
            self.copies[name].grad = gradient.mul_(clipped)
        return self.copies

    def put_back(self, names: Collection[str]) -> None:
        """Write the weights of these names, changed since, to where the optimizer and forwards have them."""
        if not (self.in_parts and names):
            return
        for partition in partitions(*self.backend, writing=True):
            for span in partition.spans:
                if span.name in names:
                    changed = self.copies[span.name].view(-1)[span.start : span.start + span.size]
                    flat(partition.tensor)[span.offset : span.offset + span.size].copy_(changed)

    def _gathered(self, read: Callable[[Partition], Any]) -> dict[str, torch.Tensor]:
        """Sum up what each rank has of the weights, or of tensors like them, in one exchange."""
        accelerator = self.backend[0]
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in self.parameters.items()}
        buffer = torch.zeros(sum(shape.numel() for shape in shapes.values()), device=accelerator.device)
        places = dict(zip(shapes, buffer.split([shape.numel() for shape in shapes.values()]), strict=True))
        for partition in partitions(*self.backend):
            for span in partition.spans if partition.written else []:
                if span.name in places:
                    own = flat(read(partition))[span.offset : span.offset + span.size]
                    places[span.name][span.start : span.start + span.size].copy_(own)
        if accelerator.num_processes > 1:
            torch.distributed.all_reduce(buffer)
        return {name: place.view(shapes[name]) for name, place in places.items()}
