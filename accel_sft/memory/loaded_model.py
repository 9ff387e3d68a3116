"""Computes what a loaded model will take: its first update, a forward, a checkpoint, its optimizer states on the host.

`estimate` in closed_form.py reads a model's config.json instead, and knows the families that it can count. What is here
reads the prepared model, whatever its family, and counts the least or about the most, as each function says. It is the
only module of this package that imports torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from accel_sft.api.launch_limits import STATE_BYTES
from accel_sft.launch.info import Launch
from accel_sft.memory.closed_form import CUDA_BYTES, FILE_BYTES, checkpoint_bytes_each
from accel_sft.memory.job import pinned
from accel_sft.memory.states import AVERAGE, FLOAT32, IMPORTANCES, MASTER, MOMENTS, WHOLE


def first_update_bytes(accelerator: Accelerator, model: torch.nn.Module, *, moments: bool) -> int:
    """Return how many bytes training of a prepared model will still allocate on this rank's device beside activations.

    These are gradients, AdamW's moments, communication buffers, and what libraries allocate when they are first called.
    DeepSpeed 0.19 allocates moments and buckets in the first step, and a float32 copy of the gradients in every step.

    Args:
        moments: whether AdamW's moments are allocated already, as in a resumed run.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine: Any = model if accelerator.state.deepspeed_plugin else None
    total: int = (CUDA_BYTES if accelerator.device.type == "cuda" else 0) + _largest_gradients(model)
    if _is_adalora(model):
        each = (0 if moments else IMPORTANCES) + (WHOLE if engine or accelerator.is_fsdp2 else 0)
        total += sum(trained_sizes(model)) * each
    if engine is None:
        for parameter in trained:
            # only what this rank holds: FSDP's parameters have the whole shape
            held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if held.device.type != accelerator.device.type:
                continue  # FSDP's shards on the host, where the optimizer steps them
            # DDP's buckets exist already, and hold the gradients
            tensors = (not isinstance(model, DistributedDataParallel)) + (0 if moments else 2)
            total += tensors * held.numel() * held.element_size()
        return total
    stage, ranks = engine.zero_optimization_stage(), accelerator.num_processes
    computes, accumulates = (dtype.itemsize for dtype in engine.get_data_types())
    elements = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained)
    part = math.ceil(elements / ranks)
    total += accumulates * (part if stage >= 2 else elements)
    if not engine.zero_use_cpu_optimizer():
        copied = MASTER if stage or computes < 4 else 0
        total += (copied + (0 if moments else MOMENTS)) * (part if stage else elements)
    elif not moments and getattr(engine.optimizer, "backup_optimizer", None):  # Twin-Flow's part stays on the device
        zero = engine.optimizer
        of_groups = enumerate(zero.fp32_partitioned_groups_flat)
        total += MOMENTS * sum(part.numel() for at, part in of_groups if zero.subgroup_to_device[at] != "cpu")
    if stage in (1, 2):
        total += (1 + bool(engine.zero_overlap_comm())) * engine.zero_reduce_bucket_size() * computes
    return total


def _largest_gradients(model: torch.nn.Module) -> int:
    """Return the bytes of the largest gradients that are whole at one time, beside all others: those of a parameter, or
    of an FSDP block, which are there twice in float32 (as computed, and as reduced over ranks)."""
    from torch.distributed.fsdp import FSDPModule

    block_of: dict[torch.nn.Parameter, torch.nn.Module] = {}
    blocks: type[Any] = FSDPModule
    for module in model.modules():  # outer modules first: the innermost block counts
        if isinstance(module, blocks):
            block_of.update(dict.fromkeys(module.parameters(), module))
    sizes: dict[Any, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            each = 2 * 4 if parameter in block_of else parameter.element_size()
            key = block_of.get(parameter, parameter)
            sizes[key] = sizes.get(key, 0) + each * getattr(parameter, "ds_numel", parameter.numel())
    return max(sizes.values(), default=0)


def head_size(config: Any) -> int:
    """Size of one head of the queries of a model with this configuration of its text."""
    heads: int = getattr(config, "num_attention_heads", None) or 1
    return getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads


def forward_bytes(
    model: Any,
    tokens: int,
    *,
    masked: bool,
    whole_head: bool,
    most_logits: int,
    recomputed: bool,
    itemsize: int,
    copied: tuple[int, int] = (0, 0),
) -> float:
    """Return about how many bytes a forward of `tokens` tokens keeps for its backward, by the model's matrices.

    A block keeps the inputs and outputs of its matrices, and a third of that besides (norms, rotations, residuals). For
    a Llama that is 12 h + 4 i + 3 kv numbers per token, where 10 h + 4 i + 2 kv have been measured. Of gathered
    weights, one block's are counted.

    Args:
        masked: whether attention has a mask of every token and every other.
        whole_head: whether every token's logits are computed at once.
        most_logits: how many logits are held at once otherwise.
        recomputed: whether each block keeps only its inputs, and one block at a time keeps everything.
        itemsize: bytes of one element in the computing type.
        copied: number of queries and of keys that attention copies in each layer (`Layout.copied`); keys behind a
            prefix are copied for every head of the queries.
    """
    config = model.config.get_text_config(decoder=True)
    layers = max(getattr(config, "num_hidden_layers", 1), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(parameter) for part in ends if part is not None for parameter in part.parameters()}
    numbers = 0.0
    weights = 0.0
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) >= 2 and id(parameter) not in outside:
            numbers += sum(shape[-2:]) * (chosen if len(shape) > 2 else 1) * 4 / 3
            weights += math.prod(shape)
    copies = 0
    if any(copied):
        heads = getattr(config, "num_attention_heads", None) or 1
        grouped = heads if copied[0] < copied[1] else getattr(config, "num_key_value_heads", None) or heads
        # queries and outputs, keys and values
        copies = 2 * head_size(config) * (heads * copied[0] + grouped * copied[1]) * (1 if recomputed else layers)
    if recomputed:
        width = getattr(config, "hidden_size", 0)
        numbers = numbers / layers + layers * width
    seen = tokens**2 if masked else 0
    logits = tokens * config.vocab_size if whole_head else most_logits
    return itemsize * (tokens * numbers + seen + copies + weights / layers) + 12 * logits


def checkpoint_bytes(model: Any, *, averaged: bool = False, in_pinned_memory: bool = False) -> int:
    """Return how many bytes a checkpoint of this model takes, of all ranks together, at most: on the disk, or in pinned
    host memory, which rounds each tensor up."""
    sizes: list[float] = list(trained_sizes(model))
    if in_pinned_memory:
        sizes = [pinned(FLOAT32 * size) / FLOAT32 for size in sizes]
    return int(sum(sizes)) * (checkpoint_bytes_each(averaged) + (IMPORTANCES if _is_adalora(model) else 0))


def least_host_bytes(model: Any, launch: Launch, *, on_cpu: bool, optimizer: str, averaged: bool = False) -> float:
    """Return how many bytes this machine's ranks will at least put into host memory.

    These are optimizer states, where they are offloaded or the device is a CPU, and the copy of one checkpoint file.

    Args:
        optimizer: the value of `--optimizer`.
        averaged: whether averages of the trained weights are kept.
    """
    sizes = trained_sizes(model)
    if not sizes:
        return 0.0
    ranks = launch.shard_ranks if launch.backend == "fsdp" else launch.world_size
    share = 1 / ranks if launch.stage or launch.shards_weights else 1.0
    states, moments = 0.0, STATE_BYTES[optimizer] + AVERAGE * averaged  # the least
    if launch.offload("optimizer") == "cpu":
        copy = 0 if launch.backend == "fsdp" else MASTER  # FSDP steps the weights themselves, which are there already
        states = sum(sizes) * share * (moments + copy + FLOAT32) * (1 if on_cpu else launch.offload_ratio)
    elif on_cpu and launch.offload("optimizer") == "none":
        states = sum(sizes) * share * (moments + (MASTER if launch.backend == "deepspeed" else 0))
    largest = max(sizes) * (share if launch.shards_weights else 1 / launch.local_world_size)
    each = checkpoint_bytes_each(averaged)
    file = min(sum(sizes) / launch.world_size * each, FILE_BYTES + largest * each)
    return (states + file) * launch.local_world_size


def trained_sizes(model: Any) -> list[int]:
    """Number of elements of each trained parameter, counted whole where ranks hold shards."""
    return [getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad]


def _is_adalora(model: Any) -> bool:
    return any(".lora_E." in name for name, _ in model.named_parameters())
