"""Finds which slice of each parameter, and of the parameter's Adam state, this rank owns, under ZeRO 0-3, DDP, FSDP and
tensor parallelism."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's states that have a value for each element of a parameter."""
IN_8_BITS = ("state1", "state2")
"""Names of the states of bitsandbytes' 8-bit AdamW. States of tensors below 4,096 elements are float32."""
AVERAGE = "average"
"""Name, in checkpoints, of the averages of `--ema-decay`."""
SCALES = ("absmax1", "absmax2")
"""Scales of the 8-bit states. bitsandbytes keeps one scale per block, so a parameter is only saved as a whole."""


class Span(NamedTuple):
    """Elements `start` to `start + size` of the flattened parameter `name`, at `offset` of the partition's tensor."""

    name: str
    start: int
    offset: int
    size: int


class Partition(NamedTuple):
    """A tensor that the optimizer updates, and the spans of parameters in the tensor."""

    tensor: torch.Tensor
    spans: list[Span]
    optimizer: Any  # torch's AdamW, DeepSpeed's for host memory, or bitsandbytes'
    copied: bool = True  # whether forwards compute with copies instead of this tensor
    written: bool = True  # whether this rank saves the tensor: unsharded tensors are saved by one rank

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state for this tensor; empty before the first step."""
        state: dict[str, Any] = self.optimizer.state[self.tensor]
        return state

    @property
    def kinds(self) -> tuple[str, ...]:
        """The names of the optimizer's states that have a value for each element."""
        return IN_8_BITS if hasattr(self.optimizer, "init_state") else MOMENTS

    def begin_state(self, step: int) -> None:
        """Create a state of zeros, as the optimizer's first step does, but with a step count of `step`."""
        if self.kinds == IN_8_BITS:
            for number, group in enumerate(self.optimizer.param_groups):
                for place, parameter in enumerate(group["params"]):
                    if parameter is self.tensor:
                        self.optimizer.init_state(group, parameter, number, place)
            self.state["step"] = step
            return
        plain = hasattr(self.optimizer, "ds_opt_adam")  # DeepSpeed's own Adam counts steps in a plain number
        device = self.tensor.device if self.optimizer.defaults.get("fused") else "cpu"
        self.state["step"] = step if plain else torch.tensor(float(step), device=device)
        dtype = torch.float32 if getattr(self.optimizer, "fp32_optimizer_states", False) else self.tensor.dtype
        for key in self.kinds:
            self.state[key] = torch.zeros_like(self.tensor.detach(), dtype=dtype)


def partitions(accelerator: Accelerator, model: Any, optimizer: Any, writing: bool = False) -> Iterator[Partition]:
    """Yield this rank's partitions. With `writing`, the caller's changes to a partition reach the model's weights."""
    if accelerator.is_fsdp2:
        _free_gathered(model)
    names = {id(p): name for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad}
    deepspeed = accelerator.distributed_type == DistributedType.DEEPSPEED
    if deepspeed and model.zero_optimization_stage() == 3:
        yield from _of_stage_3(accelerator, model.optimizer, names, writing)
    elif deepspeed and model.zero_optimization_stage():
        yield from _of_stages_1_and_2(model.optimizer, names, writing)
    else:
        yield from _of_parameters(accelerator, model.optimizer if deepspeed else optimizer, names, writing)


def _of_parameters(
    accelerator: Accelerator, optimizer: Any, names: dict[int, str], writing: bool
) -> Iterator[Partition]:
    """A torch optimizer updates the parameters directly. Parameters may be sharded: by FSDP along the first dimension,
    or by tensor parallelism (see `by_rows`). In half precision, DeepSpeed's stage 0 updates float32 copies instead."""
    inner = getattr(optimizer, "optimizer", optimizer)
    parameters = stepped = [p for group in inner.param_groups for p in group["params"]]
    if hasattr(optimizer, "fp32_groups"):
        parameters = [p for group in optimizer.fp16_groups for p in group]
        stepped = [p for group in optimizer.fp32_groups for p in group]
    for number, (parameter, tensor) in enumerate(zip(parameters, stepped, strict=True)):
        sharded = hasattr(parameter, "placements")
        start, size = _rows_of(parameter) if sharded else (0, tensor.numel())
        span = Span(names[id(parameter)], start, 0, size)
        written = (
            _of_first_copy(parameter) if sharded else number % accelerator.num_processes == accelerator.process_index
        )
        # empty spans stay under tensor parallelism: every rank must call `by_rows`, a collective
        spans = [span] if span.size or not _has_rows(tensor) else []
        yield Partition(tensor, spans, inner, tensor is not parameter, written)
        if writing and tensor is not parameter:
            parameter.data.copy_(tensor.data)


def _free_gathered(model: Any) -> None:
    """Free the weights that FSDP left gathered after an evaluation (with `reshard_after_forward` off): while gathered,
    they replace the shards that the optimizer updates."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _rows_of(parameter: Any) -> tuple[int, int]:
    """Offset of this rank's rows in the flattened parameter, and their number of elements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape = parameter.shape
    local, offsets = compute_local_shape_and_global_offset(shape, parameter.device_mesh, _in_rows(parameter))
    return int(offsets[0] * (parameter.numel() // max(shape[0], 1))), math.prod(local)


def _of_first_copy(parameter: Any) -> bool:
    """Whether this rank's shard belongs to the first of HSDP's model copies; always true without HSDP."""
    places = zip(parameter.device_mesh.get_coordinate(), parameter.placements, strict=True)
    return all(place == 0 for place, placement in places if placement.is_replicate())


def _of_stages_1_and_2(zero: Any, names: dict[int, str], writing: bool) -> Iterator[Partition]:
    """A rank updates one contiguous part of each group of flattened, concatenated parameters."""
    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        spans = []
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:
                in_parameter, in_part = mapping.lp_fragment_address, mapping.hp_fragment_address
                spans.append(Span(names[id(parameter)], in_parameter.start, in_part.start, in_parameter.numel))
        yield Partition(flat, spans, zero.optimizer)
    if writing:
        zero.update_lp_params()


def _of_stage_3(accelerator: Accelerator, zero: Any, names: dict[int, str], writing: bool) -> Iterator[Partition]:
    """A rank updates its part of every parameter. Parts are padded to one size. NVMe offload keeps them on disk."""
    if writing:
        zero._partition_all_parameters()
    for number, parameters in enumerate(zero.fp16_groups):
        on_disk = zero._swappable_optimizer_subgroup(number)
        if on_disk:
            zero._optimizer_states_and_gradient_swap_in(number)
        spans = []
        for parameter in parameters:
            _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * accelerator.process_index
            if (real := min(size, parameter.ds_numel - start)) > 0:
                spans.append(Span(names[id(parameter)], start, offset, real))
        # under Twin-Flow, a second optimizer (torch's AdamW) updates the sub-groups that stay on the device
        beside = zero.offload_optimizer and zero.subgroup_to_device[number] != "cpu"
        optimizer = zero.backup_optimizer if beside else zero.optimizer
        yield Partition(zero.fp32_partitioned_groups_flat[number], spans, optimizer)
        if writing:
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if on_disk and writing:
            zero._optimizer_states_and_gradient_swap_out(number)
        elif on_disk:
            zero._release_swap_buffers(number)
    if writing:
        zero._post_step(set())


def _in_rows(tensor: Any) -> list[Any]:
    """The placements under which each rank has complete rows of a sharded tensor."""
    from torch.distributed.tensor import Shard

    return [placement if placement.is_replicate() else Shard(0) for placement in tensor.placements]


def _has_rows(tensor: Any) -> bool:
    return not hasattr(tensor, "placements") or list(tensor.placements) == _in_rows(tensor)


def by_rows(tensor: Any) -> Any:
    """Return the tensor sharded by rows, since ranks save contiguous elements. If it was sharded by columns, it is
    resharded, which is a collective."""
    return tensor if _has_rows(tensor) else tensor.detach().redistribute(placements=_in_rows(tensor))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a tensor that is unsharded or sharded by rows, flattened."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)
