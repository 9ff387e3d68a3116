"""Merges an adapter into the weights of its base, and checks that the model gives the same logits as before."""

from typing import Any

import torch
from transformers import AutoConfig

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch.precision import type_in_files
from accel_sft.models.adapters import merged
from accel_sft.models.architecture import without_adapter
from accel_sft.models.load import load_model
from accel_sft.models.pretrained import stored_dtype
from accel_sft.models.source import Source

DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOLERANCE = 1e-3
"""Allowed difference between merged and unmerged logits, as a share of the largest logit (at least of 1). Rounding in
float32 stays below it, and a wrong merge exceeds it by far."""
_PROBE = "How much is 12 + 34? Say it in one word: forty-six. Und wie heißt das auf Deutsch, 中文呢？"


def merge(source: Source, tokenizer: Any, dtype: str | None, *, trust_remote_code: bool) -> tuple[Any, str]:
    """Return the merged model and the name of its dtype. Base and adapter are added in float32 on the CPU, and the sum
    is rounded once to `dtype`: a name in DTYPES, or None for the dtype in the base's files."""
    if source.adapter is None:
        raise UserError(f"{source.weights} has full weights and no adapter: there is nothing to merge; use it as it is")
    config = TrainConfig(dtype="float32", trust_remote_code=trust_remote_code)
    adapted = load_model(source, config, precision="no", deepspeed=False, tokenizer=tokenizer).eval()
    base = without_adapter(adapted)
    stored = stored_dtype(AutoConfig.from_pretrained(source.weights, trust_remote_code=trust_remote_code))
    if getattr(base.config, "quantization_config", None):
        raise UserError(
            f"{source.weights}: the base is quantized, so merging would lose precision; name unquantized weights as "
            "base_model_name_or_path in adapter_config.json"
        )
    ids = torch.tensor([tokenizer(_PROBE)["input_ids"]])
    with torch.no_grad():
        apart = adapted(input_ids=ids).logits[0]
        model = merged(adapted, source.adapter)
        model.tie_weights()
        difference = (model(input_ids=ids).logits[0] - apart).abs().max().item()
        if not difference <= _TOLERANCE * max(apart.abs().max().item(), 1.0):  # NaN is refused too
            raise UserError(
                f"{source.adapter} cannot be merged: logits would be off by {difference:.2g}; it is not finite, "
                "belongs to another base, or adapts only one of two tied layers (embeddings, head)"
            )
        dtype = dtype or next((name for name, kind in DTYPES.items() if kind == stored), "float32")
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(type_in_files(model, name, tensor, DTYPES[dtype]))
    return model, dtype
