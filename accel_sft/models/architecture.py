"""Which arguments a model's forward takes, and which of its layers have no full causal attention."""

import inspect

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer


def arguments(model: torch.nn.Module) -> set[str]:
    """Names that the causal model's forward takes, below an adapter."""
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return set(inspect.signature(base.forward).parameters)


def limited_layers(model: torch.nn.Module, longest: int) -> str | None:
    """Names the layers without full causal attention at this length (sliding window, recurrent); None without any.

    The names are those of the caches that transformers makes for them.
    """
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        return f"unknown, {type(error).__name__}: {error}"
    kinds = {
        type(layer).__name__.removeprefix("Dynamic")
        for layer in layers
        if type(layer) is not DynamicLayer
        and not (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= longest)
    }
    return ", ".join(sorted(kinds)) or None
