"""Liger's Triton kernels in a model's own layers: norms, rotary positions, gated feed-forwards (arXiv 2410.10989)."""

import os
from typing import Any

import torch

from accel_sft.api.errors import UserError, first_line
from accel_sft.launch.environment import device_count
from accel_sft.models.architecture import without_adapter

_FLAG = "--use-liger-kernel"
_LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger's losses are not used: the loss here is a sum over a whole step's supervised tokens (batching/loss.py)."""


def liger() -> Any:
    """The module of liger-kernel that puts kernels into models.

    Raises:
        UserError: liger-kernel is not installed or cannot be loaded, or there is no GPU (Triton's interpreter,
            TRITON_INTERPRET=1, takes the place of a GPU, slowly).
    """
    if not device_count() and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"{_FLAG}: its kernels need a GPU; leave it out")
    try:
        from liger_kernel.transformers import monkey_patch
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"{_FLAG}: needs liger-kernel ({error}); pip install 'accel-sft[liger]'") from None
    return monkey_patch


def put_kernels_in(model: torch.nn.Module) -> int:
    """Replace the forwards of the model's layers by Liger's kernels, in place, also below an adapter.

    Returns:
        the number of layers whose forward is now a kernel's; functions that kernels replace are not counted.
    Raises:
        UserError: Liger has no kernels for this family of models, or none that fit the installed transformers.
    """
    package = liger()
    base = without_adapter(model)
    family = base.config.model_type
    if family not in package.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"{_FLAG}: liger-kernel has no kernels for models of type {family}; leave it out")
    try:
        package._apply_liger_kernel_to_instance(base, **_LEFT_OUT)
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        line = first_line(error)
        raise UserError(f"{_FLAG}: its kernels do not fit this model of type {family} ({line}); leave it out") from None
    return sum(_is_kernel(module.forward) for module in base.modules())


def _is_kernel(forward: Any) -> bool:
    return str(getattr(forward, "__module__", "")).startswith("liger_kernel.")
