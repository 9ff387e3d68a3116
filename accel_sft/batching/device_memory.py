"""Recognises that a device is out of memory, and computes how much memory a prepared model's first update takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.nn.parallel import DistributedDataParallel

from accel_sft.batching.layouts import Batching
from accel_sft.launch.ulysses import sequence_ranks
from accel_sft.memory.closed_form import CUDA_BYTES
from accel_sft.memory.job import MOST_LOGITS
from accel_sft.memory.states import MASTER, MOMENTS

_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS's handle, made in the first product, did not fit
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
LEFT_FREE = 0.2
"""Share of the device's free memory that an estimate leaves unused."""


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that a device is out of memory; libraries below torch say so in words of their own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def forwards_alone(accelerator: Accelerator) -> bool:
    """Whether a rank's forward needs no other rank. Under ZeRO-3 and FSDP ranks gather weights from each other, and
    under sequence parallelism they share a row's tokens."""
    if sequence_ranks(accelerator) > 1:
        return False
    if plugin := accelerator.state.deepspeed_plugin:
        return plugin.zero_stage < 3
    return accelerator.distributed_type != DistributedType.FSDP


def first_update_bytes(accelerator: Accelerator, model: torch.nn.Module, *, moments: bool) -> int:
    """Return how many bytes training of a prepared model will still allocate on this rank's device beside activations.

    These are gradients, AdamW's moments, communication buffers, and what libraries allocate when they are first called.
    DeepSpeed 0.19 allocates moments and buckets in the first step, and a float32 copy of the gradients in every step.

    Args:
        moments: whether AdamW's moments are allocated already, as in a resumed run.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine: Any = model if accelerator.state.deepspeed_plugin else None
    total = (CUDA_BYTES if accelerator.device.type == "cuda" else 0) + _largest_gradients(model)
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
    if stage in (1, 2):
        total += (1 + bool(engine.zero_overlap_comm())) * engine.zero_reduce_bucket_size() * computes
    return total


def _largest_gradients(model: torch.nn.Module) -> int:
    """Return the bytes of the largest gradients that are whole at one time, beside all others: those of a parameter, or
    of an FSDP block, which are there twice in float32 (as computed, and as reduced over ranks)."""
    from torch.distributed.fsdp import FSDPModule

    block_of: dict[torch.nn.Parameter, torch.nn.Module] = {}
    for module in model.modules():  # outer modules first: the innermost block counts
        if isinstance(module, FSDPModule):
            block_of.update(dict.fromkeys(module.parameters(), module))
    sizes: dict[Any, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            each = 2 * 4 if parameter in block_of else parameter.element_size()
            key = block_of.get(parameter, parameter)
            sizes[key] = sizes.get(key, 0) + each * getattr(parameter, "ds_numel", parameter.numel())
    return max(sizes.values(), default=0)


def free_bytes(device: torch.device) -> float:
    """Bytes that torch may still allocate on a GPU; infinite on other devices."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def expected_bytes(model: Any, batching: Batching, *, recomputed: bool, itemsize: int) -> float:
    """Return about how many bytes a forward of `batching.tokens` keeps for its backward, by the model's matrices.

    A block keeps the inputs and outputs of its matrices, and a third of that besides (norms, rotations, residuals). For
    a Llama that is 12 h + 4 i + 3 kv numbers per token, where 10 h + 4 i + 2 kv have been measured. Of gathered
    weights, one block's are counted.

    Args:
        recomputed: whether each block keeps only its inputs, and one block at a time keeps everything.
        itemsize: bytes of one element in the computing type.
    """
    config = model.config.get_text_config(decoder=True)
    layers = max(getattr(config, "num_hidden_layers", 1), 1)
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    outside = {id(getattr(part, "weight", None)) for part in ends}
    numbers = 0.0
    weights = 0.0
    for parameter in model.parameters():
        shape = getattr(parameter, "ds_shape", parameter.shape)
        if len(shape) >= 2 and id(parameter) not in outside:
            numbers += sum(shape[-2:]) * (chosen if len(shape) > 2 else 1) * 4 / 3
            weights += math.prod(shape)
    if recomputed:
        width = getattr(config, "hidden_size", 0)
        numbers = numbers / layers + layers * width
    seen = batching.tokens**2 if batching.attention == "mask" and batching.layout != "padded" else 0
    whole_head = batching.head in ("labelled", "everywhere")
    logits = batching.tokens * config.vocab_size if whole_head else MOST_LOGITS
    return itemsize * (batching.tokens * numbers + seen + weights / layers) + 12 * logits
