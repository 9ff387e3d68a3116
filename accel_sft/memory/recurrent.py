"""Measures what layers with a state (linear attention, state space, short convolutions) keep for their backward.

They compute by chunks, to which rows are padded, and keep products of a chunk's tokens and states between chunks, far
more than inputs and outputs of matrices. So the layer runs on torch's meta device, without memory, as transformers
implements it in torch. Kernels of other packages cannot run there, and keep less.
"""

import inspect
from typing import Any

_MOST = 1024
"""Tokens up to which a row is really run; longer ones are in proportion. It is a multiple of usual chunks."""


def kept_bytes(layer: Any, config: Any, itemsize: int, prefix: int, own: int) -> tuple[float, float]:
    """Bytes that a prefix keeps, and that each row of `own` tokens keeps, which goes on from the prefix's cache.

    Args:
        layer: on the meta device.
        config: the text configuration of its model.
        itemsize: bytes of one element in the computing type.
        prefix: tokens of the prefix; 0: rows begin without a state.
    """
    import torch
    from transformers import DynamicCache

    dtype, saved = torch.float32 if itemsize == 4 else torch.bfloat16, {}
    layer.to(dtype).train()

    def save(tensor: Any) -> Any:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def kept(rows: int, tokens: int, **cache: Any) -> float:
        hidden = torch.empty(rows, min(tokens, _MOST), config.hidden_size, dtype=dtype, device="meta")
        for others in (hidden.requires_grad_(), *layer.parameters()):
            save(others)
        before = set(saved)
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            layer(hidden, **cache)
        new = (saved[key].untyped_storage().nbytes() for key in saved.keys() - before)
        return float(sum(new)) * max(tokens / _MOST, 1) / rows

    if not prefix:
        return 0.0, kept(2, own)
    name = "cache_params" if "cache_params" in inspect.signature(layer.forward).parameters else "past_key_values"
    cache = DynamicCache(config=config)
    of_prefix, states = kept(1, prefix, **{name: cache}), cache.layers[layer.layer_idx]
    for kind in (states.conv_states, states.recurrent_states):
        kind.update({at: state.expand(2, *state.shape[1:]) for at, state in kind.items() if state is not None})
    return of_prefix, kept(2, own, **{name: cache})
