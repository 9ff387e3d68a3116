"""Inspects a model's classes and configuration: the arguments of its forward, its kinds of attention, and the weights
that text uses."""

import inspect
import itertools
import re
from collections.abc import Iterable
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

REFUSALS = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors that a model's forward raises if the model does not support how rows are laid out in a batch."""
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def without_adapter(model: Any) -> Any:
    """Return the model without its adapter; without an adapter, the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def arguments(model: torch.nn.Module) -> set[str]:
    """Return the names of the arguments that the model's forward takes, whether or not it has an adapter."""
    return set(inspect.signature(without_adapter(model).forward).parameters)


def cache_argument(forward: Any) -> str | None:
    """Return the name of a forward's cache argument (`cache` since transformers 5.24), or None if it takes no cache."""
    taken = inspect.signature(forward).parameters
    return next((name for name in ("cache", "past_key_values") if name in taken), None)


def limited_layers(model: Any, longest: int) -> str | None:
    """Return the kinds of layers without full causal attention over `longest` tokens (sliding window, recurrent), named
    after transformers' caches; None if there are no such layers. MLP layers, whose cache is a dummy, do not count."""
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


def takes_sdpa(model: torch.nn.Module) -> bool:
    """Whether the model supports PyTorch's attention, sdpa."""
    return bool(getattr(without_adapter(model), "_supports_sdpa", False))


def beyond_text(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return a multimodal model's parameters outside its language model and head, by name; {} for a text model. Text
    gives these parameters no gradient, and DDP would wait for one."""
    base = without_adapter(model)
    if base.config.get_text_config(decoder=True) is base.config:
        return {}
    parts = base.get_decoder(), base.get_input_embeddings(), base.get_output_embeddings()
    inside = {id(parameter) for part in parts if part is not None for parameter in part.parameters()}
    return {name: parameter for name, parameter in base.named_parameters() if id(parameter) not in inside}


def parts_of(names: Iterable[str]) -> list[str]:
    """Return the parts of a multimodal model, such as `vision_tower`, that contain parameters of these names."""
    return list(dict.fromkeys(name.removeprefix("model.").split(".")[0] for name in names))


def alike(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in numbers (of layers, of experts): `layers.0-3,7.norm.weight (5)`."""
    by_form: dict[str, list[list[str]]] = {}
    for name in names:
        by_form.setdefault(_NUMBER.sub("*", name), []).append(_NUMBER.findall(name))
    return [_with_numbers(form, numbers) for form, numbers in by_form.items()]


def _with_numbers(form: str, numbers: list[list[str]]) -> str:
    for place in zip(*numbers, strict=True):
        runs = itertools.groupby(enumerate(sorted({*map(int, place)})), lambda at: at[1] - at[0])
        ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
        form = form.replace("*", ",".join(f"{low}-{high}" if high > low else str(low) for low, high in ends), 1)
    return f"{form} ({len(numbers)})" if len(numbers) > 1 else form
