"""Groups of ranks that share each row's tokens (sequence parallelism) or each matrix (tensor parallelism).

Sequence parallelism is DeepSpeed's Ulysses: each rank of a group computes with its part of a row's tokens. Around
attention the ranks exchange queries, keys and values, so that in attention each rank has all tokens for its part of the
heads (Jacobs et al., 2023, arXiv 2309.14509; for models of transformers: Bekman et al., 2025, arXiv 2506.13996).
Tensor parallelism follows transformers' own plans: all ranks of a group compute the same rows, each with its part of
every matrix (Shoeybi et al., 2019, arXiv 1909.08053).
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from accel_sft.api.errors import UserError, first_line

_shared: dict[str, Callable[..., Any]] = {}
"""Maps a name such as `sdpa` to DeepSpeed's attention over a group of ranks, which calls the attention of this name."""
_GROUPS = "num_key_value_groups"
_groups: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""Query heads per key head of each attention module, to restore after sequence parallelism: if there are more ranks
than key heads, DeepSpeed 0.19 changes this number in the module, and attention over whole rows would fail."""


def sequence_ranks(accelerator: Accelerator) -> int:
    """Return how many ranks share the tokens of each row; 1 without sequence parallelism."""
    dimensions = accelerator.parallelism_config
    return dimensions.sp_size if dimensions else 1


def tensor_ranks(accelerator: Accelerator) -> int:
    """Return how many ranks share each matrix, and compute the same rows; 1 without tensor parallelism."""
    dimensions = accelerator.parallelism_config
    return dimensions.tp_size if dimensions else 1


def row_groups(accelerator: Accelerator) -> tuple[int, int]:
    """Return the number of groups that compute different rows, and the index of this rank's group. Without tensor
    parallelism, each rank is a group."""
    ranks = tensor_ranks(accelerator)
    return accelerator.num_processes // ranks, accelerator.process_index // ranks


def prepare(accelerator: Accelerator, model: Any, *optimizer: Any) -> Any:
    """Call `accelerator.prepare` in the way that the launch's parallelism needs. Under sequence parallelism, ranks then
    share rows in attention only inside `shared_rows`. Under tensor parallelism the model must be sharded already."""
    if tensor_ranks(accelerator) > 1:
        return _prepare_cut(accelerator, model, *optimizer)
    if (ranks := sequence_ranks(accelerator)) == 1:
        return accelerator.prepare(model, *optimizer)
    name = str(getattr(model.config, "_attn_implementation", None))
    if name != "sdpa" and "flash" not in name:
        raise UserError(f"sequence parallelism over {ranks} ranks needs --attn-implementation sdpa, not {name}")
    accelerator.parallelism_config.sp_handler.sp_attn_implementation = name
    try:
        prepared = accelerator.prepare(model, *optimizer)
    except ValueError as error:  # DeepSpeed or Accelerate cannot divide the heads or cut the layers
        reason = first_line(error)
        raise UserError(f"sequence parallelism over {ranks} ranks: {reason}; train with z3.yaml instead") from error
    _groups.update({module: getattr(module, _GROUPS) for module in model.modules() if hasattr(module, _GROUPS)})
    # DeepSpeed has put its own attention into every forward. It ignores masks: allow it only in `shared_rows`
    _shared[name] = ALL_ATTENTION_FUNCTIONS.pop(name)
    return prepared


def _prepare_cut(accelerator: Accelerator, model: Any, *optimizer: Any) -> Any:
    """Prepare a model under tensor parallelism, which `accelerator.prepare` would wrap into DDP on CPUs."""
    model.config.distributed_config = None  # otherwise an export, which rank 0 does alone, would wait for other ranks
    prepared = accelerator.prepare_model(model, evaluation_mode=True)
    return (prepared, *map(accelerator.prepare_optimizer, optimizer)) if optimizer else prepared


@contextlib.contextmanager
def shared_rows() -> Iterator[None]:
    """Context manager for training's forwards and backwards: under sequence parallelism, ranks share each row."""
    ALL_ATTENTION_FUNCTIONS.update(_shared)
    try:
        yield
    finally:
        for name in _shared:
            ALL_ATTENTION_FUNCTIONS.pop(name)
        for module, groups in _groups.items():
            setattr(module, _GROUPS, groups)
