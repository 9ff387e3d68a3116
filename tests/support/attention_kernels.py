"""Which kernel torch's scaled_dot_product_attention takes on a GPU, by the rules that torch publishes.

A torch without CUDA cannot be asked. The rules are those of `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`
(torch 2.6 to 2.13), as far as this package's calls reach them. `TABLE` is what a test on a GPU can compare with
`torch.backends.cuda.can_use_flash_attention` and its likes.
"""

from __future__ import annotations

from typing import NamedTuple

FLASH, CUDNN, EFFICIENT, MATH = "flash", "cudnn", "efficient", "math"
HALVES = ("bfloat16", "float16")


class Call(NamedTuple):
    """One call of attention.

    Attributes:
        mask: `none`, `causal` (the flag, no tensor), or `tensor`.
        square: whether there are as many queries as keys.
        grouped: whether keys have fewer heads, which `enable_gqa` lets the kernel handle.
        capability: the GPU's compute capability, 8.0 for A100, 9.0 for H100, 10.0 for B200.
        cudnn_last: whether TORCH_CUDNN_SDPA_DEPRIORITIZED=1 is set.
    """

    dtype: str = "bfloat16"
    head_size: int = 128
    mask: str = "none"
    square: bool = True
    grouped: bool = False
    dropout: float = 0.0
    capability: tuple[int, int] = (9, 0)
    cudnn_last: bool = True


def kernel(call: Call) -> str:
    """The first kernel in torch's order of preference that takes the call."""
    order = [FLASH, EFFICIENT, MATH]
    order.insert(2 if call.cudnn_last or call.capability < (9, 0) else 0, CUDNN)
    return next(name for name in order if TAKES[name](call))


def _flash(call: Call) -> bool:
    """No mask but causality of a square, half precision, heads of at most 256, from A100 on."""
    short = call.head_size <= 256
    if call.dropout and call.head_size > 192 and call.capability in ((8, 6), (8, 9), (12, 0), (12, 1)):
        short = False  # their shared memory does not hold this backward
    masked = call.mask == "tensor" or (call.mask == "causal" and not call.square)
    return call.dtype in HALVES and short and not masked and call.capability >= (8, 0)


def _cudnn(call: Call) -> bool:
    """Half precision, heads of at most 128 (256 from H100 on) in multiples of 8."""
    most = 256 if call.capability >= (9, 0) else 128
    return (
        call.dtype in HALVES
        and call.head_size % 8 == 0
        and call.head_size <= most
        and call.capability >= (8, 0)
        and not (call.mask == "causal" and not call.square)
    )


def _efficient(call: Call) -> bool:
    """Any mask and float32 too, but as many heads of keys as of queries; heads in multiples of 8 (float32: of 4)."""
    aligned = call.head_size % (8 if call.dtype in HALVES else 4) == 0
    return not call.grouped and aligned and (call.dtype != "bfloat16" or call.capability >= (8, 0))


TAKES = {FLASH: _flash, CUDNN: _cudnn, EFFICIENT: _efficient, MATH: lambda call: True}

TABLE = [
    (Call(), FLASH),
    (Call(mask="causal"), FLASH),
    (Call(mask="causal", grouped=True), FLASH),
    (Call(mask="tensor"), EFFICIENT),
    (Call(mask="tensor", grouped=True), CUDNN),
    (Call(mask="tensor", square=False), EFFICIENT),
    (Call(mask="causal", head_size=256), FLASH),
    (Call(mask="causal", head_size=512), EFFICIENT),
    (Call(mask="causal", dtype="float32"), EFFICIENT),
    (Call(mask="causal", dtype="float32", grouped=True), MATH),
    (Call(mask="causal", dropout=0.1), FLASH),
    (Call(mask="causal", dropout=0.1, head_size=256, capability=(8, 9)), EFFICIENT),
    (Call(mask="causal", cudnn_last=False), CUDNN),
    (Call(mask="causal", cudnn_last=False, capability=(8, 0)), FLASH),
    (Call(mask="tensor", cudnn_last=False), CUDNN),
    (Call(mask="causal", capability=(7, 5)), MATH),
    (Call(mask="causal", dtype="float16", capability=(7, 5)), EFFICIENT),
]
"""Calls and the kernel that each takes."""
