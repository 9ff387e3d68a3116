"""Reads from a model's classes and configuration: its forward's arguments, its attention, what weights text reaches."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a model's forward raises where it does not support a layout of rows."""


def without_adapter(model: Any) -> Any:
    """The causal model below an adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def arguments(model: torch.nn.Module) -> set[str]:
    """Names that the causal model's forward takes, below an adapter."""
    return set(inspect.signature(without_adapter(model).forward).parameters)


def limited_layers(model: torch.nn.Module, longest: int) -> str | None:
    """Names the layers without full causal attention at this length (sliding window, recurrent); None if there are
    none.

    The names are those of the caches that transformers makes for them. A layer whose cache is empty ("dummy"), such as
    a plain MLP, attends to no other token.
    """
    try:
        layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    except (AttributeError, TypeError, ValueError, KeyError) as error:
        return f"unknown, {type(error).__name__}: {error}"
    kinds = {
        type(layer).__name__.removeprefix("Dynamic")
        for layer in layers
        if type(layer) is not DynamicLayer
        and type(layer).__name__ != "DummyLayer"
        and not (type(layer) is DynamicSlidingWindowLayer and layer.sliding_window >= longest)
    }
    return ", ".join(sorted(kinds)) or None


def attentions(model: torch.nn.Module, *names: str) -> list[str]:
    """Which of `names` (sdpa, flex_attention) the model can be loaded with."""
    has = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    return [name for name in names if getattr(without_adapter(model), has[name], False)]


def beyond_text(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Parameters of a multimodal model outside its language model and head, which no text reaches, by name.

    Text gives them no gradient, and data parallelism would wait for one.
    """
    base = without_adapter(model)
    if base.config.get_text_config(decoder=True) is base.config:
        return {}
    parts = base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings()
    inside = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return {name: parameter for name, parameter in base.named_parameters() if id(parameter) not in inside}


def parts_of(names: Iterable[str]) -> list[str]:
    """The parts of a multimodal model that these parameters are in, such as `vision_tower`."""
    return list(dict.fromkeys(name.removeprefix("model.").split(".")[0] for name in names))
