"""Runs Liger's kernels without GPUs, by Triton's interpreter in float32.

`allow` adds what the interpreter (Triton 3.9) lacks for them: numbers passed to a kernel become float32, as under the
compiler, and the reciprocal square root, which the kernels take from CUDA's library, is Triton's own.
"""

from __future__ import annotations

import os

import numpy
import torch


def allow() -> None:
    """From now on, the kernels of norms, rotary positions and SwiGLU run on CPUs in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from liger_kernel.ops import rms_norm
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def converted(argument):
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(numpy.array([argument], numpy.float32), triton.language.float32)
        return triton.language.tensor(handle, triton.language.float32)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda value: triton.language.rsqrt(value)  # looked up when called: the interpreter replaces it


if __name__ == "__main__":
    allow()
    torch.set_num_threads(1)

    from accel_sft.__main__ import main

    main()
