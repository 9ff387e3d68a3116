"""Gives embeddings to tokens that were added to a tokenizer; an adapter can train and save these rows alone."""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional

from accel_sft.api.errors import UserError

_SAMPLED = 8192
"""Number of old rows, spread over the vocabulary, whose mean initializes new rows."""
_SPREAD = 0.1
"""Standard deviation of new rows around that mean, as a share of the old rows' deviation: enough to distinguish new
tokens, too little to make any of them likely (Hewitt, 2021: the mean keeps the model's predictions)."""


def know_tokens(
    model: Any, tokenizer: Any, seed: int, log: Callable[[str], None], new_tokens: Collection[int] = ()
) -> None:
    """Enlarge the model's embedding and head to a row for each token of the tokenizer. New rows are drawn around the
    mean of the old rows. Rows that `new_tokens` have already (a matrix's padding, often zeros) are redrawn likewise."""
    size = max(tokenizer.get_vocab().values()) + 1
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    before = getattr(embedding.weight, "ds_shape", embedding.weight.shape)[0]
    text = model.config.get_text_config(decoder=True)
    spare = sorted(token for token in new_tokens if token < before)
    if size > before or spare:
        parts = [part for part in (embedding, head) if part is not None]
        if any(hasattr(part.weight, "placements") or part.weight.is_meta for part in parts):
            raise UserError(
                "new tokens need embeddings, which tensor parallelism and --offload cannot add; launch with "
                "accelerate_configs/z3.yaml, or name a merged model"
            )
        tied = head is not None and head.weight is embedding.weight
        grown, size = size > before, max(size, before)
        embedding.weight, embedding.num_embeddings = _enlarged(embedding.weight, size, spare, seed), size
        if head is not None:
            head.weight = embedding.weight if tied else _enlarged(head.weight, size, spare, seed)
            head.out_features = size
            if getattr(head, "bias", None) is not None:
                head.bias = _enlarged(head.bias, size, spare, seed)
        text.vocab_size = size
        if hasattr(model, "vocab_size"):
            model.vocab_size = size
        if grown:
            log(f"embeddings enlarged from {before:,} to {size:,} tokens")
    text.eos_token_id = tokenizer.eos_token_id


def _enlarged(weight: torch.nn.Parameter, size: int, spare: list[int], seed: int) -> torch.nn.Parameter:
    """Return a matrix (V, H) or a vector (V,), unsharded and with `size` rows; rows in `spare` are redrawn too."""
    with _gathered(weight):
        old = weight.detach().clone()
    some = old[:: -(-len(old) // _SAMPLED)].double()
    new = [*spare, *range(len(old), size)]
    noise = torch.randn(len(new), *old.shape[1:], generator=torch.Generator().manual_seed(seed)).to(some)
    rows = some.mean(0) + _SPREAD * some.std(0) * noise
    enlarged = torch.cat([old, old.new_empty(size - len(old), *old.shape[1:])])
    enlarged[new] = rows.to(old.dtype)
    return torch.nn.Parameter(enlarged, requires_grad=weight.requires_grad)


def _gathered(*weights: Any) -> Any:
    """Within this context, weights sharded by ZeRO-3 are gathered."""
    sharded = [weight for weight in weights if hasattr(weight, "ds_id")]
    if not sharded:
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(sharded)


def trained_beside(model: Any, tokens: Sequence[int], others: list[str]) -> dict[str, Any]:
    """Return peft's argument that makes an adapter train the rows of these tokens in the embedding and the head, except
    in matrices named in `others`, which are adapted or trained in full."""
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    named = {name.rpartition(".")[2]: part for name, part in model.named_modules() if any(part is end for end in ends)}
    rows = {name: list(tokens) for name in named if tokens and name not in others}
    for name in rows:
        if getattr(named[name], "bias", None) is not None or not hasattr(named[name], "weight"):
            raise UserError(
                f"--chat-template: its tokens are new to this model, and peft cannot train single rows of {name}, "
                f"which has a bias; add --lora-modules-to-save {','.join(named)}"
            )
    return {"trainable_token_indices": rows} if rows else {}


@contextlib.contextmanager
def rows_made(model: Any) -> Iterator[None]:
    """Within this context peft can add trainable embedding rows, even if ZeRO-3 has sharded embedding and head: peft
    0.21 gathers them only on GPUs."""
    from peft.tuners.trainable_tokens import layer

    ends = [part.weight for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part is not None]
    original, layer.check_deepspeed_zero3_enabled = layer.check_deepspeed_zero3_enabled, lambda: False
    try:
        with _gathered(*{id(weight): weight for weight in ends}.values()):
            yield
    finally:
        layer.check_deepspeed_zero3_enabled = original


def use_rows(adapted: Any) -> None:
    """Make layers with trained rows call their frozen layer and replace its output for these rows. peft's own forward
    copies the full matrix to insert the rows, and bypasses the hooks with which ZeRO-3 gathers the matrix."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for layer in adapted.modules():
        if isinstance(layer, TrainableTokensLayer):
            vars(layer)["forward_adapters"] = functools.partial(_forward, layer, {})


def _forward(
    layer: Any, ids_on: dict[Any, torch.Tensor], x: torch.Tensor, active: Any, *args: Any, **kwargs: Any
) -> Any:
    """Compute a TrainableTokensLayer: embeddings (B, T, H) from token ids, or logits (..., V) from hidden states."""
    if layer.disable_adapters or layer.merged or not active:
        return type(layer).forward_adapters(layer, x, active, *args, **kwargs)
    base, (name,) = layer.base_layer, active
    output = base(x, *args, **kwargs)
    if x.device not in ids_on:  # copied only once: the host waits for each copy to a GPU
        ids_on[x.device] = torch.tensor(layer.token_indices[name], device=x.device)
    ids, rows = ids_on[x.device], layer.trainable_tokens_delta[name]
    if isinstance(base, torch.nn.Linear):
        return output.index_copy(-1, ids, functional.linear(x, rows.to(x.dtype)).to(output.dtype))
    is_one = x[..., None] == ids
    own = functional.embedding(is_one.int().argmax(-1), rows)
    if (scale := layer._get_embed_scale()) is not None:
        own = own * scale.to(own.dtype)
    return torch.where(is_one.any(-1, keepdim=True), own.to(output.dtype), output)
