"""An adapter added to the weights below it while nothing is trained, without a weight being written (law 3)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import psutil
import torch
from torch.nn import functional

SPARE = 2
"""Merged weights are made only where so many times their memory is free."""


@contextlib.contextmanager
def merged(model: torch.nn.Module) -> Iterator[None]:
    """Inside, each linear layer with LoRA or AdaLoRA multiplies once, by base and adapter together.

    The sums are tensors of their own, and every parameter stays what and where it is: there is nothing to take back,
    also when the block raises.

    Args:
        model: one of which `reason_unmergeable` has nothing to say.
    """
    layers = _layers(model)
    try:
        for layer in layers:
            base = layer.get_base_layer()
            delta = functools.reduce(torch.add, map(layer.get_delta_weight, _active(layer)))
            layer.forward = functools.partial(_linear, (base.weight + delta).detach(), base.bias)
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _linear(
    weight: torch.Tensor, bias: torch.Tensor | None, hidden: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    return functional.linear(hidden, weight, bias)


def _active(layer: Any) -> list[str]:
    return [name for name in layer.active_adapters if name in layer.lora_A]


def _layers(model: torch.nn.Module) -> list[Any]:
    """Layers whose sum is a plain linear layer; others stay as they are, which is exact as well."""
    if not hasattr(model, "peft_config"):
        return []
    from peft.tuners.adalora import SVDLinear
    from peft.tuners.lora import Linear

    return [
        layer
        for layer in model.modules()
        if isinstance(layer, (Linear, SVDLinear))
        and type(layer.get_base_layer()) is torch.nn.Linear
        and _active(layer)
        and not (layer.merged or layer.disable_adapters or layer.fan_in_fan_out or "forward" in layer.__dict__)
        and not getattr(layer, "lora_variant", None)
        and not any(getattr(layer, "lora_bias", {}).values())
    ]


def reason_unmergeable(model: torch.nn.Module) -> str | None:
    """Why an adapter is better left apart: sums would be rounded, or there is no room; None if nothing speaks so.

    Args:
        model: whole, not sharded.
    """
    weights = [layer.get_base_layer().weight for layer in _layers(model)]
    if any(weight.dtype != torch.float32 for weight in weights):
        return "its sum with the weights would be rounded"
    needed = sum(weight.numel() * weight.element_size() for weight in weights)
    devices = {weight.device for weight in weights}
    free = min((_free_bytes(device) for device in devices), default=0)
    return f"its sum with the weights takes {needed / 2**30:.1f} GiB more memory" if SPARE * needed > free else None


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
