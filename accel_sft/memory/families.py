"""Counts a model's parameters from its config.json alone, for families whose layers are known; without torch.

The layers are those of transformers 5.23; tests/tools/test_plan.py builds each family on the meta device and compares.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from accel_sft.memory.shape import Block, Matrix, ModelShape
from accel_sft.memory.vision import tower


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How a family's blocks differ from Llama's.

    Attributes:
        qkv_bias, o_bias, mlp_bias: True, False, or the key of config.json that says whether there is a bias.
        norms: how many norms of the hidden state's width a block has.
        qk_norm: whether each head's queries and keys are normed.
        fused: whether one matrix makes queries, keys and values, and one makes gate and up.
        tied: whether the head is the embedding where config.json does not say.
        lora_in_experts: whether LoRA on all linear layers also adapts experts and router.
        defaults: values of keys that published files leave out.
    """

    qkv_bias: bool | str = False
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    norms: int = 2
    qk_norm: bool = False
    fused: bool = False
    tied: bool = False
    lora_in_experts: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_LLAMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias")
_QWEN3 = Family(qkv_bias="attention_bias", o_bias="attention_bias", qk_norm=True)
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
_GEMMA = Family(qkv_bias="attention_bias", o_bias="attention_bias", tied=True)
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(),
    "qwen2": Family(qkv_bias=True),
    "qwen3": _QWEN3,
    "gemma": _GEMMA,
    "gemma2": dataclasses.replace(_GEMMA, norms=4),
    "gemma3_text": dataclasses.replace(_GEMMA, norms=4, qk_norm=True, defaults=_GEMMA3),
    "phi3": Family(fused=True),
    "mixtral": Family(lora_in_experts=True),
    "qwen2_moe": Family(qkv_bias="qkv_bias", defaults={"qkv_bias": True}),
    "qwen3_moe": dataclasses.replace(_QWEN3, lora_in_experts=True),
}
_TEXT_OF = {
    "gemma3": "gemma3_text",
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""The family of a multimodal model's language model, by the `model_type` of its text configuration, or else its own."""


def text_config(config: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """The language model's configuration, and whether it is a part of a multimodal one."""
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(config), "vision_config" in config
    merged = {key: config[key] for key in ("tie_word_embeddings", "vocab_size") if key in config}
    merged |= {"model_type": config.get("model_type"), **inner}
    return merged, True


def count(config: Mapping[str, Any], stored: int | None = None) -> ModelShape | None:
    """The shape of a model with this configuration; None if its family is not among FAMILIES, or if keys are missing or
    are not numbers.

    Args:
        config: the content of config.json.
        stored: number of parameters in the weight files, if known. Those beyond the language model count as `other`.
    """
    text, multimodal = text_config(config)
    name = str(text.get("model_type"))
    family = FAMILIES.get(_TEXT_OF.get(name, name))
    if family is None:
        return None
    text = {**family.defaults, **{key: value for key, value in text.items() if value is not None}}
    try:
        shape = _counted(name, family, text)
    except (KeyError, TypeError, ValueError):  # the caller asks transformers next, which says what is wrong
        return None
    if multimodal:
        eyes = tower(config.get("vision_config") or {})
        beyond = stored - shape.parameters if stored else eyes.parameters if eyes else 0
        source = "config.json" if stored else "config.json (its vision tower by a ViT's formula)"
        name, other = str(config.get("model_type")), max(beyond, 0)
        shape = dataclasses.replace(shape, family=name, other=other, source=source, tower=eyes)
    return shape


def _counted(name: str, family: Family, text: Mapping[str, Any]) -> ModelShape:
    hidden, heads, layers = (int(text[key]) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    key_value = int(text.get("num_key_value_heads", heads))
    dim = int(text.get("head_dim", hidden // heads))
    attention = _attention(family, text, hidden, heads * dim, key_value * dim)
    vectors = family.norms * hidden + (2 * dim if family.qk_norm else 0)
    sparse = [_is_sparse(text, layer) for layer in range(layers)]
    blocks = [
        Block(count=sparse.count(kind), matrices=(*attention, *feed_forward(family, text, hidden)), vectors=vectors)
        for kind, feed_forward in ((False, _dense), (True, _experts))
        if kind in sparse
    ]
    return ModelShape(
        family=name,
        hidden_size=hidden,
        vocab_size=int(text["vocab_size"]),
        heads=heads,
        key_value_heads=key_value,
        head_dim=dim,
        tied=bool(text.get("tie_word_embeddings", family.tied)),
        blocks=tuple(blocks),
        vectors=hidden,
    )


def _attention(family: Family, text: Mapping[str, Any], hidden: int, queries: int, keys: int) -> list[Matrix]:
    qkv_bias, o_bias = _given(family.qkv_bias, text), _given(family.o_bias, text)
    outputs = {"qkv_proj": queries + 2 * keys} if family.fused else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    into = [
        Matrix(name=name, inputs=hidden, outputs=size, group="attention", bias=qkv_bias)
        for name, size in outputs.items()
    ]
    return [*into, Matrix(name="o_proj", inputs=queries, outputs=hidden, group="attention", bias=o_bias)]


def _dense(family: Family, text: Mapping[str, Any], hidden: int) -> list[Matrix]:
    return _gated(hidden, int(text["intermediate_size"]), family.fused, _given(family.mlp_bias, text))


def _gated(hidden: int, inner: int, fused: bool = False, bias: bool = False) -> list[Matrix]:
    into = {"gate_up_proj": 2 * inner} if fused else {"gate_proj": inner, "up_proj": inner}
    return [
        *(Matrix(name=n, inputs=hidden, outputs=size, group="feed_forward", bias=bias) for n, size in into.items()),
        Matrix(name="down_proj", inputs=inner, outputs=hidden, group="feed_forward", bias=bias),
    ]


def _experts(family: Family, text: Mapping[str, Any], hidden: int) -> list[Matrix]:
    """Router and experts are plain parameters since transformers 5; a shared expert is made of linear layers."""
    copies = int(text.get("num_experts") or text["num_local_experts"])
    inner = int(text.get("moe_intermediate_size") or text["intermediate_size"])
    active, ranks = int(text["num_experts_per_tok"]), int(family.lora_in_experts)
    fused = functools.partial(Matrix, group="experts", copies=copies, active=active, is_linear=False)
    found = [
        Matrix(name="gate", inputs=hidden, outputs=copies, group="experts", is_linear=False, lora_ranks=ranks),
        fused(name="gate_up_proj", inputs=hidden, outputs=2 * inner, lora_ranks=2 * ranks),
        fused(name="down_proj", inputs=inner, outputs=hidden, lora_ranks=ranks),
    ]
    if shared := text.get("shared_expert_intermediate_size"):
        found += _gated(hidden, int(shared))
        found += [Matrix(name="shared_expert_gate", inputs=hidden, outputs=1, group="feed_forward")]
    return found


def _is_sparse(text: Mapping[str, Any], layer: int) -> bool:
    """Whether the block of this index, from 0, has experts."""
    experts = text.get("num_experts") or text.get("num_local_experts")
    dense = layer in (text.get("mlp_only_layers") or ())
    return bool(experts) and not dense and (layer + 1) % int(text.get("decoder_sparse_step", 1)) == 0


def _given(bias: bool | str, text: Mapping[str, Any]) -> bool:
    return bool(text.get(bias, False)) if isinstance(bias, str) else bias
