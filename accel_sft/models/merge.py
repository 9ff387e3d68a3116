"""Adds an adapter to its base's weights, and measures whether the sum predicts what the two predict apart."""

import dataclasses
from typing import Any

import torch
from transformers import AutoConfig

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch.precision import type_in_files
from accel_sft.models.adapters import is_mergeable, type_of
from accel_sft.models.architecture import without_adapter
from accel_sft.models.load import load_model
from accel_sft.models.pretrained import stored_dtype
from accel_sft.models.source import Source

DTYPES = {"bf16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_TOLERANCE = 1e-3
"""Allowed difference between merged and unmerged logits, as a share of the largest logit (or of 1 where all logits are
smaller). Float32 rounding stays below it; a wrong merge is far above."""
_PROBE = "How much is 12 + 34? Say it in one word: forty-six. Und wie heißt das auf Deutsch, 中文呢？"


@dataclasses.dataclass(frozen=True)
class Merged:
    """A merged model, and how far its logits for a probe are from those of the unmerged model.

    Attributes:
        dtype: type of its weights, a name in DTYPES.
        difference: largest difference of a logit, with the sum in float32.
        rounded: largest difference of a logit, with weights rounded to `dtype` and computed in it.
        largest: the largest logit by absolute value.
        same, tokens: how many next tokens the rounded weights predict like the unmerged model, and out of how many.
    """

    model: Any
    dtype: str
    difference: float
    rounded: float
    largest: float
    same: int
    tokens: int

    def describe(self) -> str:
        """The measurement in one line."""
        line = f"in float32 logits are off by {self.difference:.1e} at most (the largest is {self.largest:.3g})"
        if self.dtype != "float32":
            line += f", in {self.dtype} by {self.rounded:.1e}; {self.same} of {self.tokens} next tokens the same"
        return line


def merge(source: Source, tokenizer: Any, dtype: str | None, *, trust_remote_code: bool) -> Merged:
    """Return the base of `source` with its adapter added: summed in float32 on the CPU, then rounded once.

    Args:
        dtype: a name in DTYPES; None: the type in which the base's weights are stored.
    Raises:
        UserError: there is no adapter, its type cannot be added to weights, the base is quantized, or the merged model
            would predict something else; the message says why.
    """
    if source.adapter is None:
        raise UserError(f"{source.weights}: full weights, no adapter: there is nothing to merge; use them as they are")
    config = TrainConfig(dtype="float32", trust_remote_code=trust_remote_code)
    adapted = load_model(source, config, precision="no", deepspeed=False, tokenizer=tokenizer).eval()
    base = without_adapter(adapted)
    stored = stored_dtype(AutoConfig.from_pretrained(source.weights, trust_remote_code=trust_remote_code))
    if getattr(base.config, "quantization_config", None):
        raise UserError(
            f"{source.weights}: the base is quantized, and the sum would be rounded to its few values; merge into "
            "whole weights: name them as base_model_name_or_path in adapter_config.json"
        )
    if not is_mergeable(adapted):
        raise UserError(f"{source.adapter}: adapters of type {type_of(adapted)} cannot be added to the weights")
    shared = _tied_and_adapted(adapted)
    ids = torch.tensor([tokenizer(_PROBE)["input_ids"]])
    with torch.no_grad():
        apart = adapted(input_ids=ids).logits[0]
        model = adapted.merge_and_unload()
        model.tie_weights()
        difference = _off(model(input_ids=ids).logits[0], apart)
        largest = apart.abs().max().item()
        if not difference <= _TOLERANCE * max(largest, 1.0):  # NaN is refused too
            why = f"the adapter changes {shared}" if shared else "see that its weights are finite, and of this base"
            raise UserError(
                f"{source.adapter}: cannot be merged: the sum's logits would be off by {difference:.2g} (the largest "
                f"is {largest:.3g}); {why}"
            )
        dtype = dtype or next((name for name, kind in DTYPES.items() if kind == stored), "float32")
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = tensor.data.to(type_in_files(model, name, tensor, DTYPES[dtype]))
        found = model(input_ids=ids).logits[0].float()
    same = int((found.argmax(-1) == apart.argmax(-1)).sum())
    return Merged(model, dtype, difference, _off(found, apart), largest, same, ids.shape[1])


def _off(found: torch.Tensor, expected: torch.Tensor) -> float:
    return (found - expected).abs().max().item()


def _tied_and_adapted(model: Any) -> str:
    """A phrase that names a layer of the adapter whose weights are tied to another layer's; "" if there is none."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter.data_ptr(), []).append(name)
    for name, module in model.named_modules():
        inner = module.get_base_layer() if hasattr(module, "get_base_layer") else None
        inner = getattr(module, "original_module", inner)
        weight = getattr(inner, "weight", None) if inner is not module else None
        if name and weight is not None and len(names.get(weight.data_ptr(), ())) > 1:
            return f"{name.rpartition('.')[2]}, whose weights are also those of another layer (tied embeddings)"
    return ""
