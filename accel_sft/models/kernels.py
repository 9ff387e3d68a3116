"""Replaces how a model's layers are computed, with bitsandbytes, Liger's kernels or torch's compiler."""

import os
import sys
from typing import Any

import torch

from accel_sft.api.errors import UserError, first_line
from accel_sft.io.text import one_line
from accel_sft.launch.environment import device_count
from accel_sft.models.architecture import without_adapter

COMPILED_VARIANTS = 64
"""Maximum number of variants of a block's code that torch compiles. All blocks of a model share one code object, and
each combination of mask, dropout, gradient mode and adapter needs a variant of it. The checks before the first step
need up to 11 variants, so with torch's default, 8, all of training would run uncompiled."""
_FLAG = "--use-liger-kernel"
_LEFT_OUT = {"cross_entropy": False, "fused_linear_cross_entropy": False}
"""Liger's losses are not used, as the trainer sums the loss over all supervised tokens of a step (batching/loss.py)."""


def bitsandbytes(flag: str) -> Any:
    """Return the package bitsandbytes; raise UserError if it is missing. `flag` is the option that needs it."""
    try:
        import bitsandbytes as package
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"{flag} needs bitsandbytes ({error}); pip install 'accel-sft[bitsandbytes]'") from None
    return package


def in_4bit(name: str, settings: Any, compute: torch.dtype) -> dict[str, Any]:
    """Return arguments of transformers' from_pretrained for QLoRA (Dettmers et al., 2023): weights in NF4 with 8-bit
    scales, dequantized to `compute` for each matrix product."""
    from transformers import BitsAndBytesConfig

    bitsandbytes("--load-in-4bit")
    if getattr(settings, "quantization_config", None):
        raise UserError(f"--load-in-4bit: {name} is quantized already; omit the option, or name another model")
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=compute
    )
    return {"quantization_config": quantization}


def keep_as_trained(model: Any) -> None:
    """Keep 4-bit weights in their training format during evaluation: on a CPU with bfloat16 instructions, bitsandbytes
    0.50 would repack the weights and not restore them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False


def liger() -> Any:
    """Return the module of liger-kernel that puts its kernels into models. The kernels need a GPU, or Triton's slow
    interpreter (TRITON_INTERPRET=1)."""
    if not device_count() and os.environ.get("TRITON_INTERPRET") != "1":
        raise UserError(f"{_FLAG}: Liger's kernels need a GPU; omit the option")
    try:
        from liger_kernel.transformers import monkey_patch
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(f"{_FLAG} needs liger-kernel ({error}); pip install 'accel-sft[liger]'") from None
    return monkey_patch


def put_kernels_in(model: torch.nn.Module) -> int:
    """Replace the forwards of the model's layers (even inside an adapter) by Liger's kernels, in place. Return the
    number of layers whose forward is now one of these kernels."""
    package, base = liger(), without_adapter(model)
    family = base.config.model_type
    if family not in package.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise UserError(f"{_FLAG}: liger-kernel has no kernels for models of type {family}; omit the option")
    try:
        package._apply_liger_kernel_to_instance(base, **_LEFT_OUT)
    except (AttributeError, ImportError, NotImplementedError, TypeError, ValueError) as error:
        problem = f"Liger's kernels do not fit this model of type {family} ({first_line(error)})"
        raise UserError(f"{_FLAG}: {problem}; omit the option") from None
    sources = (str(getattr(module.forward, "__module__", "")) for module in base.modules())
    return sum(source.startswith("liger_kernel.") for source in sources)


def compile_blocks(model: Any) -> None:
    """Set each of the model's repeated blocks (decoder layers) to be compiled by torch in its first forwards."""
    import torch._dynamo

    names = set(getattr(model, "_no_split_modules", None) or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError("--compile: the model does not name its repeated blocks (_no_split_modules); omit --compile")
    torch._dynamo.config.recompile_limit = COMPILED_VARIANTS
    for block in blocks:
        block.compile(dynamic=True)  # forwards differ in length


def trouble_of_compiling(error: BaseException) -> str:
    """The message for an error of torch's compiler on the blocks' first forward; "" for any other error."""
    compiler = sys.modules.get("torch._dynamo.exc")  # imported by torch when it compiles
    if compiler is None or not isinstance(error, compiler.BackendCompilerFailed):
        return ""
    return (
        f"--compile: torch cannot compile ({one_line(first_line(error), 48)}); check g++ (on GPUs gcc) and "
        "TORCHINDUCTOR_CACHE_DIR, or leave --compile out"
    )


def compile_seconds() -> float:
    """Seconds that torch has spent compiling in this process."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)
