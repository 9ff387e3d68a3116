"""Counts the multiplications that a program really does: FLOPs of matrix products and attention, padding included."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


class Counted(TorchDispatchMode):
    """While entered, adds up `flops`, with those of attention on CPUs, which torch's own counter does not know."""

    flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, called = func(*args, **kwargs), func.overloadpacket
        if called is aten._scaled_dot_product_flash_attention_for_cpu:
            self.flops += sdpa_flop_count(*(tensor.shape for tensor in args[:3]))
        elif called is aten._scaled_dot_product_flash_attention_for_cpu_backward:
            self.flops += sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4]))
        elif called in flop_registry:
            self.flops += flop_registry[called](*args, **kwargs, out_val=result)
        return result
