"""Makes tiny random models of the architectures that people fine-tune, saved so that `--model` can read them.

Each family's configuration is transformers' own, made small: it gets the fields of SMALL that it has, then its own
entry in FAMILIES. What characterises an architecture (experts, latent attention, windows, recurrent layers) is kept.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models import TEXTS
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from accel_sft.models.tiny import train_tokenizer

SMALL: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "max_position_embeddings": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 64},
    **{"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512, "ffn_dim": 48, "word_embed_proj_dim": 32},
    **{"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "query_pre_attn_scalar": 8},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "activation_dropout", "dropout", "residual_dropout"), 0.0),
    **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0),
    **dict.fromkeys(("initializer_range", "init_std"), 0.3),  # with the usual 0.02, tokens hardly influence each other
    **{"state_size": 8, "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
LATENT |= {"num_key_value_heads": 4, "head_dim": None}
SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
EYES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8},
    **{"depth": 1, "num_heads": 4, "out_hidden_size": 32, "patch_size": 4, "image_size": 16},
    **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]},
    **{"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
}
HYBRID = ["linear_attention", "full_attention"] * 2
FAMILIES: dict[str, dict[str, Any]] = {
    # dense
    **{name: {} for name in ("llama", "qwen2", "qwen3", "olmo2", "granite", "glm4", "stablelm", "phi3", "gemma")},
    **{name: {} for name in ("cohere", "gpt2", "gpt_neox", "opt", "falcon", "nemotron", "bloom")},
    # windows
    **{name: {} for name in ("mistral", "gemma2", "gemma3_text", "cohere2", "exaone4")},
    # experts
    **{name: {} for name in ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe", "phimoe")},
    "gpt_oss": {"intermediate_size": 64},  # in its published weights, each 32 numbers share a scale
    # latent attention
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v4": {"q_lora_rank": 16, "o_lora_rank": 8, "o_groups": 2, "num_key_value_heads": 1, "head_dim": 16}
    | {"index_n_heads": 2, "index_head_dim": 8, "index_topk": 8},
    # recurrent layers, alone and beside attention
    "qwen3_next": {"layer_types": HYBRID},
    "qwen3_5_text": {"layer_types": HYBRID},
    "olmo_hybrid": {"layer_types": HYBRID},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    **{name: {} for name in ("minimax", "mamba", "falcon_mamba")},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2, "n_groups": 1},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_groups": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "use_mamba_kernels": False},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "moe_shared_expert_intermediate_size": 16}
    | {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 8},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2, "n_mamba_heads": 4, "mamba_ngroups": 1}
    | {"num_mem_blocks": 1, "use_mem_rope": True, "adapter_rank": 4},
    # vision; the fields are the language model's
    **{name: {} for name in ("gemma3", "mistral3")},
    "qwen2_5_vl": {"rope_parameters": SECTIONS},
    "qwen3_vl": {"rope_parameters": SECTIONS},
    "qwen3_5": {"layer_types": HYBRID},
    "llama4": {"intermediate_size_mlp": 48},
}

RANDOM = {"phimoe"}
"""Families whose forward is random in training even without dropout, since they draw experts at random."""
BROKEN = {"5.24.0": {"llama4"}}
"""Families that a release of transformers cannot compute: Llama 4 reads an output that its language model lacks."""


def parameter(family: str, *marks: Any) -> Any:
    """A test's parameter, skipped where the installed transformers cannot compute this family."""
    broken = family in BROKEN.get(transformers.__version__, ())
    reason = f"transformers {transformers.__version__} cannot compute {family}"
    return pytest.param(family, marks=[*marks, pytest.mark.skipif(broken, reason=reason)])


def make(folder: Path, family: str) -> Path:
    """Write a model of this family with a tokenizer; its weights are random, but the same each time."""
    tokenizer = train_tokenizer(TEXTS)
    torch.manual_seed(0)
    config = configuration(family, tokenizer)
    model = auto_class(config).from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    """The model as transformers loads it, in float32; multimodal if it was saved so."""
    return auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32).eval()


def auto_class(config: PretrainedConfig) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def configuration(family: str, tokenizer: Any) -> PretrainedConfig:
    """The small configuration of a family, with this tokenizer's vocabulary and special tokens."""
    made, vocabulary = CONFIG_MAPPING[family], -len(tokenizer) // 64 * -64
    special = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {"vocab_size": vocabulary, **special}
    if not hasattr(whole := made(), "vision_config"):
        return made(**text, **_known(made, SMALL) | FAMILIES[family])
    language, eyes = type(whole.text_config), type(whole.vision_config)
    images = [name for name in _known(made, whole.to_dict()) if re.search("token_(id|index)$", name)]
    return made(
        text_config=language(**text, **_known(language, SMALL) | FAMILIES[family]),
        vision_config=eyes(**_known(eyes, EYES)),
        **{name: vocabulary - 1 - number for number, name in enumerate(images)},
    )


def _known(kind: type, values: dict[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(kind.__init__).parameters) | set(vars(kind()))
    return {name: value for name, value in values.items() if name in known}
