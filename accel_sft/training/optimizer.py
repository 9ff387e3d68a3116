"""Makes the optimizer, and runs backward, clipping and update on every backend.

`Whole` gives trained weights and gradients unsharded and equal on all ranks, even if the backend shards them.
"""

import contextlib
import math
from collections.abc import Callable, Collection
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from accel_sft.api.config import TrainConfig
from accel_sft.batching.device_memory import forwards_alone
from accel_sft.checkpoint.partition import Partition, flat, partitions
from accel_sft.checkpoint.shards import Averages, loss_scale
from accel_sft.launch.groups import row_groups, sequence_ranks
from accel_sft.models.adapters import adapter_of
from accel_sft.models.kernels import bitsandbytes
from accel_sft.tracking.time_spent import BACKWARD, OPTIMIZER, span


def new_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that `--optimizer` names, with weight decay on matrices only: AdamW (Loshchilov and Hutter, 2019),
    or bitsandbytes' with states in 8 bits (Dettmers et al., 2022)."""
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) >= 2]
    vectors = [p for p in trained if len(getattr(p, "ds_shape", p.shape)) < 2]
    decays = [
        # under tensor parallelism, torch's fused AdamW takes no group with both sharded and whole tensors
        ([p for p in params if hasattr(p, "placements") is cut], decay)
        for params, decay in ((matrices, config.weight_decay), (vectors, 0.0))
        for cut in (True, False)
    ]
    # no empty group: DeepSpeed rejects one
    groups: list[Any] = [{"params": params, "weight_decay": decay} for params, decay in decays if params]
    adam: dict[str, Any] = {"lr": config.learning_rate, "betas": (config.adam_beta1, config.adam_beta2), "eps": 1e-8}
    if config.optimizer == "adamw-8bit":
        return bitsandbytes("--optimizer adamw-8bit").optim.AdamW8bit(groups, **adam)
    return torch.optim.AdamW(groups, **adam, fused=True)


class Stepper:
    """Runs backward and update on every backend; the caller, not the backend, decides which micro-batch ends a step.

    Backends average gradients over ranks, so a micro-batch's loss must be sum(nll) * `averaged_over` / N, where N is
    the number of supervised tokens in the step. Under DeepSpeed the engine clips (launch/accelerator.py sets it up);
    elsewhere `update` clips. With `ema_decay`, each update that changes weights also updates `averages`.
    """

    def __init__(
        self, accelerator: Accelerator, model: Any, optimizer: Any, max_grad_norm: float, ema_decay: float | None = None
    ) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.max_grad_norm = max_grad_norm
        self.engine: Any = model if accelerator.distributed_type == DistributedType.DEEPSPEED else None
        self.adapted = accelerator.unwrap_model(model)
        self.adapter = adapter_of(self.adapted)
        self.averages = Averages(accelerator, model, optimizer, ema_decay) if ema_decay is not None else None

    def set_learning_rate(self, rate: float) -> None:
        # DeepSpeed's Twin-Flow copies the first group for its second optimizer, and never updates the rate in the copy
        second = getattr(getattr(self.engine, "optimizer", None), "backup_optimizer", None)
        for group in (*self.optimizer.param_groups, *(second.param_groups if second else ())):
            group["lr"] = rate

    def boundary(self, last: bool) -> contextlib.AbstractContextManager:
        """Return a context for a micro-batch's forward and backward. Ranks exchange gradients in the last micro-batch.

        FSDP ranks also exchange them (by reduce-scatter) in earlier micro-batches: otherwise each rank would keep
        unsharded gradients, in the computing dtype. Only the last micro-batch waits for that exchange; under HSDP,
        only the last one averages over the groups.
        """
        if self.engine is not None:
            self.engine.set_gradient_accumulation_boundary(last)
        elif self.accelerator.distributed_type == DistributedType.FSDP:
            self.model.set_is_last_backward(last)
            self.model.set_requires_all_reduce(last)
        elif not last:
            return self.accelerator.no_sync(self.model)
        return contextlib.nullcontext()

    @span(BACKWARD)
    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of one micro-batch; call this inside `boundary`."""
        if self.engine is not None:
            self.engine.backward(loss, scale_wrt_gas=False)
        else:
            self.accelerator.backward(loss)

    @span(OPTIMIZER)
    def update(self, step: int) -> float:
        """Clip the gradients, update the weights, clear the gradients; returns the gradient norm before clipping. If
        the norm is NaN or infinite, the weights do not change."""
        reads, gathered, clipped = self.adapter.reads(self.adapted, step), None, 1.0
        if reads:
            gathered = Whole(self.accelerator, self.model, self.optimizer, *reads)
        if self.engine is not None:
            norm = self._unmanaged_norm()
            if norm is not None and not math.isfinite(norm):
                self.engine.zero_grad()
                return norm
            if gathered:
                gathered.keep_gradients()
            self.engine.step()
            managed, updated = self.engine.get_global_grad_norm(), self.engine.was_step_applied()
            norm = float(managed if managed is not None else math.nan if norm is None else norm)
            clipped = min(1.0, self.max_grad_norm / (norm + 1e-6)) if self.max_grad_norm else 1.0  # as all backends do
        else:
            # read before the update: reading it afterwards would make the host wait for the update too
            norm = float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.max_grad_norm or math.inf))
            updated = math.isfinite(norm)
            if gathered and updated:
                gathered.keep_gradients()
            if updated or self.accelerator.scaler is not None:  # a loss scaler skips the step, and lowers its scale
                self.optimizer.step()
        if gathered and updated:
            gathered.put_back(self.adapter.after_step(self.adapted, step, gathered.weights(clipped)))
        if self.averages and updated:
            self.averages.update()
        if self.engine is None:
            self._clear_gradients()
        return norm

    @property
    def averaged_over(self) -> int:
        """What the backend divides the sum of gradients by: the number of ranks, unless ranks share rows or matrices.

        Under sequence parallelism each rank has the gradient of its part of a row. DeepSpeed 0.19 divides the sum of
        these gradients by the number of groups at stages 0 to 2, and by the number of all ranks at stage 3.
        """
        ranks, _ = row_groups(self.accelerator)  # under tensor parallelism each rank has the whole gradient of its part
        stage = self.engine.zero_optimization_stage() if self.engine is not None else 0
        return ranks if stage == 3 else ranks // sequence_ranks(self.accelerator)

    @property
    def alone(self) -> bool:
        """Whether a step may be repeated after any failure, because no engine or other rank takes part."""
        return self.engine is None and self.accelerator.num_processes == 1

    @property
    def forwards_alone(self) -> bool:
        """Whether one rank's forward can fail without hanging the others, because ranks wait for each other only in
        backwards."""
        return forwards_alone(self.accelerator)

    def discard_gradients(self) -> None:
        """Drop a step's gradients before it is repeated. DeepSpeed's are NaN on all ranks, so `update` skips them."""
        if self.engine is not None:
            self.update(0)
        self._clear_gradients()
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def _clear_gradients(self) -> None:
        """Drop the gradients. Under DDP they are views of its buckets, so zero them: new tensors would need memory."""
        self.optimizer.zero_grad(set_to_none=not isinstance(self.model, DistributedDataParallel))

    def _unmanaged_norm(self) -> float | None:
        """The norm of all averaged gradients at stage 0, where DeepSpeed computes no norm; None at other stages."""
        if self.engine.zero_optimization_stage() > 0:
            return None
        grads = [p.grad for p in self.engine.module.parameters() if p.grad is not None]
        return torch.nn.utils.get_total_norm(grads).item() if grads else None


class Whole:
    """The trained weights whose names contain a given text, unsharded, before and after one update. If the backend
    shards, the weights are copies. All methods are collectives."""

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
        """Between backward and update, copy the gradients in float32 if `after_step` will read them."""
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
        """The updated weights (float32 if the optimizer's are), with their gradients multiplied by `clipped`."""
        if not self.in_parts:
            return self.parameters
        self.copies = self._gathered(lambda partition: partition.tensor)
        for name, gradient in self.gradients.items():
            self.copies[name].grad = gradient.mul_(clipped)
        return self.copies

    def put_back(self, names: Collection[str]) -> None:
        """Copy the weights with these names, changed by the caller, into the optimizer's and the forwards' tensors."""
        if not (self.in_parts and names):
            return
        for partition in partitions(*self.backend, writing=True):
            for part in partition.spans:
                if part.name in names:
                    changed = self.copies[part.name].view(-1)[part.start : part.start + part.size]
                    flat(partition.tensor)[part.offset : part.offset + part.size].copy_(changed)

    def _gathered(self, read: Callable[[Partition], Any]) -> dict[str, torch.Tensor]:
        """Assemble the weights, or tensors with the weights' shapes, from all ranks' parts in one exchange."""
        accelerator = self.backend[0]
        shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in self.parameters.items()}
        buffer = torch.zeros(sum(shape.numel() for shape in shapes.values()), device=accelerator.device)
        places = dict(zip(shapes, buffer.split([shape.numel() for shape in shapes.values()]), strict=True))
        for partition in partitions(*self.backend):
            for part in partition.spans if partition.written else []:
                if part.name in places:
                    own = flat(read(partition))[part.offset : part.offset + part.size]
                    places[part.name][part.start : part.start + part.size].copy_(own)
        if accelerator.num_processes > 1:
            torch.distributed.all_reduce(buffer)
        return {name: place.view(shapes[name]) for name, place in places.items()}
