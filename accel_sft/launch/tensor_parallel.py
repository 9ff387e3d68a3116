"""Tensor parallelism by transformers' own plans: all ranks of a group compute the same rows, each with its part of
every matrix (Shoeybi et al., 2019, arXiv 1909.08053)."""

from typing import Any

from accelerate import Accelerator


def tensor_ranks(accelerator: Accelerator) -> int:
    """Return how many ranks share each matrix, and compute the same rows; 1 without tensor parallelism."""
    dimensions = accelerator.parallelism_config
    return dimensions.tp_size if dimensions else 1


def row_groups(accelerator: Accelerator) -> tuple[int, int]:
    """Return the number of groups of ranks that have rows of their own, and the index of this rank's group. Without
    tensor parallelism, each rank is such a group."""
    ranks = tensor_ranks(accelerator)
    return accelerator.num_processes // ranks, accelerator.process_index // ranks


def prepare(accelerator: Accelerator, model: Any, optimizer: Any = None) -> Any:
    """Do what `accelerator.prepare` does, for a model that was cut as it was loaded; without an optimizer, the model
    alone is returned.

    Accelerate would wrap the model into DDP on CPUs, where it takes tensor parallelism for none.
    """
    model.config.distributed_config = None  # with it, rank 0, which alone writes an export, would wait for the others
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    return prepared if optimizer is None else (prepared, accelerator.prepare_optimizer(optimizer))
