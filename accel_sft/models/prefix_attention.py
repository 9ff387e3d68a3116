"""Computes the attention of rows to themselves and to one copy of their common prefix, in training and generation.

The prefix is computed once, and the rows continue from its cache. This is differentiable and works with all kinds of
layers: attention layers cache the prefix's keys and values, and stateful layers cache their state. The rows share the
cache by reference, so one backward adds up the rows' gradients of the prefix, and goes through the prefix once.
"""

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import AttentionInterface

from accel_sft.models.architecture import arguments, cache_argument, without_adapter
from accel_sft.models.cascade import PrefixedRows, cascade, cut_rows, probe_kernels, usable


def install(device: torch.device | None = None) -> None:
    """Make the sdpa attention of all models in this process accept the arguments `rows` and `decoding`; without them
    nothing changes. With `device`, also probe the fused kernels of cascade.py on this device."""
    if device is not None:
        probe_kernels(device)
    AttentionInterface.register("sdpa", rows_attention)


def installed() -> bool:
    """Whether sdpa accepts `rows` and `decoding`; plain sdpa would ignore them, so that rows would see each other."""
    return AttentionInterface()["sdpa"] is rows_attention


def rows_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    rows: PrefixedRows | None = None,
    decoding: Callable[..., torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """sdpa for rows in one sequence: each row sees the prefix and itself, but no other row; the prefix sees itself.

    Without a prefix, the rows are cut out of the sequence into a batch, and their outputs are put back into a sequence.
    The query is (1, heads, T, D), key and value may have fewer heads; the output is (1, T, heads, D). If `decoding` is
    given (evaluation/decoder.py), it computes the attention instead.
    """
    if decoding is not None:
        return decoding(module, query, key, value, kwargs.get("scaling")), None
    sdpa: Any = sdpa_attention_forward
    if rows is None:
        return sdpa(module, query, key, value, attention_mask, *args, **kwargs)
    kwargs.pop("is_causal", None)
    query, key, value = (_as_autocast(tensor) for tensor in (query, key, value))
    if not rows.prefix:
        cut = [cut_rows(tensor, rows) for tensor in (query, key, value)]
        output, _ = sdpa(module, *cut, None, *args, is_causal=True, **kwargs)
        return output.flatten(0, 1)[rows.back][None], None
    others = (kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))
    if any(args) or kwargs.get("dropout") or any(others) or not usable(query, key, value):
        # a trial before step 1 catches this; rows then use a cache
        raise NotImplementedError("no kernels for such rows after a prefix")
    return cascade(query, key, value, rows, kwargs.get("scaling")), None


def _as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """Under autocast, cast a float32 tensor (such as rotated queries): autocast does not cover these kernels."""
    kind = tensor.device.type
    if tensor.dtype == torch.float32 and torch.is_autocast_enabled(kind):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


class PrefixCache(DynamicCache):
    """A cache that layers read without changing it. transformers' own caches change in place, so autograd could not go
    back through them, and gradient checkpointing would recompute from a changed cache."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers: list[Any] = self.layers
        self.read: list[Any] | None = [None] * len(self.layers)
        """Each layer's cache of the prefix. The whole list becomes None once rows continue from the prefix."""

    def behind(self, rows: int) -> "PrefixCache":
        """Return the cache from which `rows` rows continue; to be called after the prefix's forward."""
        assert self.read is not None
        behind = copy.copy(self)
        behind.layers = [_copy(layer or empty) for layer, empty in zip(self.read, self.layers, strict=True)]
        behind.read = self.read = None  # so that recomputation in the backward stores nothing
        for layer in behind.layers:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(layer, name, {key: _for_rows(state, rows) for key, state in value.items()})
                else:
                    setattr(layer, name, _for_rows(value, rows))
        return behind

    def _changing(self, index: int) -> Any:
        """Return a copy of a layer's cache, which the layer's forward may change."""
        if self.read is None:
            return _copy(self.layers[index])
        self.read[index] = self.read[index] or _copy(self.layers[index])
        return self.read[index]

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        return self._changing(layer_idx).update(key_states, value_states, *args, **kwargs)

    def update_indexer(self, indexer_key_states: Any, layer_idx: int) -> Any:
        return self._changing(layer_idx).update_indexer(indexer_key_states)

    def update_conv_state(
        self, conv_states: Any, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> Any:
        """Return the convolution's inputs and the earlier ones it needs. transformers would copy them to a buffer."""
        layer, before = self._changing(layer_idx), self.layers[layer_idx]
        size = conv_kernel_size or before.conv_kernel_size[state_idx] or conv_states.shape[-1]
        if before.has_previous_state[state_idx]:
            conv_states = torch.cat([before.conv_states[state_idx], conv_states], dim=-1)
        else:
            conv_states = functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        layer.conv_states[state_idx], layer.conv_kernel_size[state_idx] = conv_states[..., -size:], size
        layer.is_conv_states_initialized[state_idx] = layer.has_previous_state[state_idx] = True
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        layer = self._changing(layer_idx)
        layer.recurrent_states[state_idx] = recurrent_states
        layer.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states


def _copy(layer: Any) -> Any:
    copied = copy.copy(layer)
    vars(copied).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    return copied


def _for_rows(value: Any, rows: int) -> Any:
    """Expand a state of the prefix, (1, ...), to all rows; return other values unchanged."""
    is_state = isinstance(value, torch.Tensor) and value.ndim > 1
    return value.expand(rows, *value.shape[1:]) if is_state else value


@contextlib.contextmanager
def with_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within this context, the module's forward is `forward`."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextlib.contextmanager
def prefix_first(model: Any, prefix: torch.Tensor) -> Iterator[None]:
    """Within this context, each forward of the model first computes the prefix, with ids (1, P), and then rows that
    continue the prefix. The model's wrapper (DDP, DeepSpeed, FSDP) sees a single forward."""
    base = without_adapter(model)
    own = base.forward
    taken = arguments(base)
    for layer in base.modules():  # transformers gives checkpointed layers no cache: they would change it again when
        if isinstance(layer, GradientCheckpointingLayer):  # recomputed. They do not change a `PrefixCache`.
            layer._can_checkpoint_with_cache = True
    cache_name = cache_argument(own) or "past_key_values"
    no_logits = {"logits_to_keep": prefix.new_zeros(0)} if "logits_to_keep" in taken else {}

    def forward(*args: Any, **kwargs: Any) -> Any:
        cache = PrefixCache(base.config)
        own(input_ids=prefix, use_cache=False, **{cache_name: cache}, **no_logits)
        rows, longest = kwargs["input_ids"].shape
        if "position_ids" in taken:  # Bamba in transformers 5.23 would begin at position 0
            positions = torch.arange(longest, device=prefix.device) + prefix.shape[1]
            kwargs["position_ids"] = positions.expand(rows, -1)
        return own(*args, **{**kwargs, cache_name: cache.behind(rows)})

    with with_forward(base, forward):
        yield
