"""Recognizes out-of-memory errors of devices, and says how much device memory torch may still allocate."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from accel_sft.io.terminal import terminal, wrapped
from accel_sft.launch.groups import sequence_ranks, tensor_ranks

Row = TypeVar("Row")
Result = TypeVar("Result")

_NO_MEMORY = (
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUBLAS_STATUS_NOT_INITIALIZED",  # cuBLAS's handle, made in the first product, did not fit
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
)
LEFT_FREE = 0.2
"""Share of a device's free memory that stays unused when a size is chosen by an estimate."""


def out_of_memory(error: BaseException) -> bool:
    """Whether the error means that a device is out of memory; the libraries that torch calls use various messages."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


def done_within_memory(work: Callable[[], None], rows: int, *, alone: bool) -> bool:
    """Do the work. Returns False if memory ran out and the caller must retry with batches of fewer than `rows` rows.
    Unless this rank works `alone`, the error is raised instead: other ranks would wait during the retry."""
    try:
        work()
        return True
    except RuntimeError as error:
        if not (alone and rows > 1 and out_of_memory(error)):
            raise
    # not in the `except` block: there, the exception's frames still hold the tensors of the failed forward
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    print(wrapped(f"out of device memory with {rows} rows at once: computing them in halves"), file=terminal())
    return False


def in_halves(work: Callable[[list[Row]], list[Result]], rows: list[Row], *, alone: bool) -> list[Result]:
    """The results of `work` on all rows or, if device memory runs out, on the first half and then on the second."""
    results: list[Result] = []
    if done_within_memory(lambda: results.extend(work(rows)), len(rows), alone=alone):
        return results
    middle = len(rows) // 2
    return [*in_halves(work, rows[:middle], alone=alone), *in_halves(work, rows[middle:], alone=alone)]


def forwards_alone(accelerator: Accelerator) -> bool:
    """Whether a rank's forward needs no other rank: ranks share no weights, matrices or tokens of a row."""
    if sequence_ranks(accelerator) > 1 or tensor_ranks(accelerator) > 1:
        return False
    if plugin := accelerator.state.deepspeed_plugin:
        return plugin.zero_stage < 3
    return accelerator.distributed_type != DistributedType.FSDP


def free_bytes(device: torch.device) -> float:
    """Bytes that torch may still allocate on a GPU; infinite on other devices."""
    if device.type != "cuda":
        return math.inf
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
