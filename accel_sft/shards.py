"""What training changes, by parameter and not by layout: written where it lies, read into any other layout (law 3).

Whatever shares a run out between processes, each holds runs of elements of flattened parameters, in float32, and
AdamW's two moments of the same elements. A checkpoint is those runs under the parameters' names, each with its place:
nothing is gathered to write it, and whoever reads it, under another number of ranks, ZeRO stage or offload, takes the
elements that are its own. Files are safetensors; numbers come back to the bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_sft.options import UserError

MOMENTS = ("exp_avg", "exp_avg_sq")
BYTES = 4 * (1 + len(MOMENTS))
"""Of a trained parameter's element in a checkpoint."""
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
"""Of DeepSpeed's scaler, what changes while it trains."""
FILE_BYTES = 1 << 30
"""A file takes no more tensors above this; so much is copied to host memory at once."""


class Run(NamedTuple):
    """Elements `start` to `start + size` of the flattened parameter `name`, from `offset` on in what holds them."""

    name: str
    start: int
    offset: int
    size: int


class Held(NamedTuple):
    """A tensor that the optimizer steps, and what of which parameters it holds.

    Attributes:
        optimizer: torch's AdamW, or DeepSpeed's for host memory.
        written: whether this rank writes it; what all ranks have whole is written by one.
    """

    tensor: torch.Tensor
    runs: list[Run]
    optimizer: Any
    written: bool = True

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's, of this tensor; empty before the first step."""
        return self.optimizer.state[self.tensor]

    def begin_state(self, step: int) -> None:
        """State of zeros, as the optimizer makes it in its first step, but after so many."""
        counted = isinstance(self.optimizer, torch.optim.AdamW)  # DeepSpeed's own counts in a plain number
        device = self.tensor.device if self.optimizer.defaults.get("fused") else "cpu"
        self.state["step"] = torch.tensor(float(step), device=device) if counted else step
        for key in MOMENTS:
            self.state[key] = torch.zeros_like(self.tensor.detach(), dtype=torch.float32)


def write(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, folder: Path) -> None:
    """This rank's part of what training has changed, as files in `folder`; all ranks together."""
    parts: dict[str, torch.Tensor] = {}
    count = size = 0

    def put() -> None:
        nonlocal count, size
        from safetensors.torch import save_file

        if parts:
            save_file(parts, folder / f"rank-{accelerator.process_index:04d}-{count:03d}.safetensors")
            count, size = count + 1, 0
            parts.clear()

    for held in _held(accelerator, model, optimizer):
        for run in held.runs if held.written else []:
            kinds = {"weights": held.tensor, **{key: held.state[key] for key in MOMENTS if key in held.state}}
            for kind, tensor in kinds.items():
                part = _flat(tensor)[run.offset : run.offset + run.size]
                # what is read from a disk for a moment only, and what is not in host memory, is copied
                parts[_key(kind, run)] = part.to("cpu", copy=True)
                size += part.numel() * part.element_size()
            if "step" in held.state:
                parts[_key("step", run)] = torch.tensor([float(held.state["step"])], dtype=torch.float64)
            if size >= FILE_BYTES:
                put()
    put()


def read(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, folder: Path) -> None:
    """Put back what `write` wrote under whatever layout; all ranks together.

    Raises:
        UserError: it does not have all of this model's trained parameters.
    """
    stored, counted = _Stored(folder), set()
    for held in _held(accelerator, model, optimizer, writing=True):
        steps = {run: stored.step(run) for run in held.runs}
        for run in held.runs:
            stored.copy("weights", run, held.tensor)
        if any(steps.values()):
            made = int(max(filter(None, steps.values())))
            held.begin_state(made)
            if hasattr(held.optimizer, "ds_opt_adam") and id(held.optimizer) not in counted:
                counted.add(id(held.optimizer))
                _count_up(held.optimizer, made)
        for run in filter(steps.get, held.runs):
            for key in MOMENTS:
                stored.copy(key, run, held.state[key])


def _count_up(optimizer: Any, steps: int) -> None:
    """Have DeepSpeed's Adam for host memory make as many steps of nothing.

    For bias correction it multiplies its betas up step by step, and out of turn takes powers, whose last bit differs.
    """
    (beta1, beta2), nothing = optimizer.defaults["betas"], [torch.zeros(1) for _ in range(4)]
    for step in range(1, steps + 1):
        optimizer.ds_opt_adam.adam_update(optimizer.opt_id, step, 0.0, beta1, beta2, 1e-8, 0.0, True, *nothing)


def loss_scale(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, float]:
    """What float16 has found to multiply losses by, and since when; {} in other precisions."""
    if accelerator.scaler is not None:
        return accelerator.scaler.state_dict()
    scaler = _deepspeed_scaler(accelerator, model)
    return {key: getattr(scaler, key) for key in SCALE if isinstance(getattr(scaler, key, None), int | float)}


def set_loss_scale(accelerator: Accelerator, model: torch.nn.Module, found: dict[str, float]) -> None:
    """Go on with it; where another library counts in another way, with a new search, which leaves out some steps."""
    if accelerator.scaler is not None:
        if found.keys() == accelerator.scaler.state_dict().keys():
            accelerator.scaler.load_state_dict(found)
        return
    scaler = _deepspeed_scaler(accelerator, model)
    for key in found.keys() & set(SCALE):
        if hasattr(scaler, key):
            setattr(scaler, key, found[key])


def _deepspeed_scaler(accelerator: Accelerator, model: Any) -> Any:
    if accelerator.distributed_type != DistributedType.DEEPSPEED or accelerator.mixed_precision != "fp16":
        return None
    return getattr(model.optimizer, "loss_scaler", None) or getattr(model.optimizer, "loss_scale_config", None)


class _Stored:
    """The runs of all files of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self.places: dict[tuple[str, str], dict[int, tuple[int, Any, str]]] = {}
        for path in sorted(folder.glob("rank-*.safetensors")):
            file = safe_open(path, framework="pt")
            for key in file.keys():  # noqa: SIM118, not a mapping
                kind, start, name = key.split(":", 2)
                size = file.get_slice(key).get_shape()[0]
                self.places.setdefault((kind, name), {})[int(start)] = (size, file, key)

    def copy(self, kind: str, run: Run, into: torch.Tensor) -> None:
        """Into the run's place in a tensor."""
        target, found = _flat(into)[run.offset : run.offset + run.size], 0
        for start, (size, file, key) in self.places.get((kind, run.name), {}).items():
            begin, end = max(start, run.start), min(start + size, run.start + run.size)
            if begin < end:
                part = file.get_slice(key)[begin - start : end - start]
                target[begin - run.start : end - run.start].copy_(part)
                found += end - begin
        if found != run.size:
            raise UserError(
                f"{self.folder}: {kind} of {found:,} of {run.size:,} elements of {run.name} are there: the checkpoint "
                "is of another model or version; start a new run from its final weights with --init-from"
            )

    def step(self, run: Run) -> float | None:
        """How often the optimizer had stepped the parameter; None: never."""
        places = self.places.get(("step", run.name), {}).values()
        return max((file.get_tensor(key).item() for _, file, key in places), default=None)


def _key(kind: str, run: Run) -> str:
    return f"{kind}:{run.start}:{run.name}"


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that this rank has of a tensor."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().view(-1)


# --- who holds what: one function for each way to share it out ---


def _held(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, writing: bool = False) -> Iterator[Held]:
    """What this rank has. With `writing`, changes made between two items are carried on to the weights that compute."""
    names = {id(p): name for name, p in accelerator.unwrap_model(model).named_parameters() if p.requires_grad}
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        yield from _of_parameters(accelerator, optimizer, names)
        return
    zero, stage = model.optimizer, model.zero_optimization_stage()
    if stage == 3:
        yield from _of_stage_3(accelerator, zero, names, writing)
    elif stage:
        yield from _of_stages_1_and_2(zero, names, writing)
    elif hasattr(zero, "fp32_groups"):
        yield from _of_stage_0_with_copies(accelerator, zero, names, writing)
    else:
        yield from _of_parameters(accelerator, zero, names)


def _of_parameters(accelerator: Accelerator, optimizer: Any, names: dict[int, str]) -> Iterator[Held]:
    """A torch optimizer steps the parameters themselves, whole, or as FSDP's shards of their first dimension."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for number, parameter in enumerate(p for group in inner.param_groups for p in group["params"]):
        sharded = hasattr(parameter, "placements")
        run = Run(names[id(parameter)], _first_element(parameter) if sharded else 0, 0, _flat(parameter).numel())
        yield Held(parameter, [run] if run.size else [], inner, sharded or _turn(accelerator, number))


def _first_element(parameter: Any) -> int:
    """Where this rank's shard begins in the flattened parameter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    placed = parameter.shape, parameter.device_mesh, parameter.placements
    return compute_local_shape_and_global_offset(*placed)[1][0] * (parameter.numel() // max(parameter.shape[0], 1))


def _of_stage_0_with_copies(
    accelerator: Accelerator, zero: Any, names: dict[int, str], writing: bool
) -> Iterator[Held]:
    """In half precision DeepSpeed's stage 0 steps a float32 copy of each parameter."""
    pairs = zip(itertools.chain(*zero.fp16_groups), itertools.chain(*zero.fp32_groups), strict=True)
    for number, (parameter, copy) in enumerate(pairs):
        run = Run(names[id(parameter)], 0, 0, copy.numel())
        yield Held(copy, [run], zero.optimizer, _turn(accelerator, number))
        if writing:
            parameter.data.copy_(copy.data)


def _turn(accelerator: Accelerator, number: int) -> bool:
    return number % accelerator.num_processes == accelerator.process_index


def _of_stages_1_and_2(zero: Any, names: dict[int, str], writing: bool) -> Iterator[Held]:
    """A rank steps one stretch of each group of parameters that were put one after the other."""
    for parameters, flat in zip(zero.bit16_groups, zero.single_partition_of_fp32_groups, strict=True):
        runs = []
        for parameter in parameters:
            if (mapping := parameter._hp_mapping) is not None:
                there, here = mapping.lp_fragment_address, mapping.hp_fragment_address
                runs.append(Run(names[id(parameter)], there.start, here.start, there.numel))
        yield Held(flat, runs, zero.optimizer)
    if writing:
        zero.update_lp_params()


def _of_stage_3(accelerator: Accelerator, zero: Any, names: dict[int, str], writing: bool) -> Iterator[Held]:
    """A rank steps its part of every parameter, padded to the same size everywhere; NVMe has it on a disk meanwhile."""
    if writing:
        zero._partition_all_parameters()
    for number, parameters in enumerate(zero.fp16_groups):
        on_disk = zero._swappable_optimizer_subgroup(number)
        if on_disk:
            zero._optimizer_states_and_gradient_swap_in(number)
        runs = []
        for parameter in parameters:
            _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
            start = size * accelerator.process_index
            if (real := min(size, parameter.ds_numel - start)) > 0:
                runs.append(Run(names[id(parameter)], start, offset, real))
        yield Held(zero.fp32_partitioned_groups_flat[number], runs, zero.optimizer)
        if writing:
            zero._reassign_or_swap_out_partitioned_parameters(number)
        if on_disk and writing:
            zero._optimizer_states_and_gradient_swap_out(number)
        elif on_disk:
            zero._release_swap_buffers(number)
    if writing:
        zero._post_step(set())
