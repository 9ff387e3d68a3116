"""Makes a rehearsal's model (a small one of the real model's family), and reports what an adapter does not reach."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line
from accel_sft.api.limits import names_of
from accel_sft.io.findings import Finding
from accel_sft.models.architecture import REFUSALS, alike
from accel_sft.models.pretrained import class_of, stored_dtype
from accel_sft.models.source import Source, errors_explained, shipped_files
from accel_sft.tools.rehearse.runs import warns

_WIDTH, _HEADS, _HEAD = 64, 4, 16
"""Hidden size, attention heads and dimensions of a head; `_HEADS * _HEAD == _WIDTH`, which some families require."""
_STATE_HEADS = 2 * _WIDTH // _HEAD
"""Heads of state-space layers, which are twice as wide as the hidden state."""
_LAYERS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"
_SIZES: dict[int, str] = {
    _WIDTH: "hidden_size n_embd d_model word_embed_proj_dim moe_intermediate_size shared_expert_intermediate_size "
    "moe_shared_expert_intermediate_size out_hidden_size vision_output_dim projector_input_dim projector_output_dim "
    "hidden_size_per_layer_input",
    2 * _WIDTH: "intermediate_size ffn_dim n_inner intermediate_size_mlp mamba_d_ssm ffn_hidden_size d_inner "
    "attention_hidden_size",
    _WIDTH // 2: "kv_lora_rank q_lora_rank attention_head_dim",
    _HEAD: "head_dim global_head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim linear_key_head_dim "
    "linear_value_head_dim mamba_d_head mamba_head_dim mamba_headdim index_head_dim o_lora_rank query_pre_attn_scalar "
    "state_size ssm_state_size mamba_d_state adapter_rank",
    _STATE_HEADS: "mamba_n_heads mamba_num_heads n_mamba_heads",
    _HEADS: "num_attention_heads n_head linear_num_value_heads num_experts num_local_experts n_routed_experts "
    "mamba_dt_rank time_step_rank",
    2: "linear_num_key_heads index_n_heads o_groups num_experts_per_tok experts_per_token top_k_experts depth",
    1: "n_group topk_group n_groups mamba_n_groups mamba_ngroups n_shared_experts",
}
_SIZE_OF = {key: size for size, keys in _SIZES.items() for key in keys.split()}
"""Sizes of the shrunk model by key of config.json. The sizes must be consistent with each other."""
_NOT_COPIED = {"config.json", "adapter_config.json", "README.md"}
_BY_LAYER = ("_indices", "_indexes", "_ids", "_idx")
"""Endings of keys whose lists hold layer numbers."""


def shrink(source: Source, folder: Path, config: TrainConfig) -> tuple[str, list[Finding]]:
    """Write a shrunk copy of the model `source` into `folder`, for `--model`, with the real tokenizer, chat template
    and generation_config.json. Return a description of the copy, and what an adapter does not reach."""
    import torch
    from transformers import AutoConfig

    trusted = config.trust_remote_code
    with errors_explained(source.weights):
        real = AutoConfig.from_pretrained(source.weights, trust_remote_code=trusted)
        small, count, layers = _smallest(real, source.weights, trusted)
        kind, dtype = class_of(small, images=True), stored_dtype(real)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model = kind.from_config(small, dtype=dtype, trust_remote_code=trusted)
        model.save_pretrained(folder)
        for path in _files_of(source.weights), _files_of(source.tokenizer):
            for file in shipped_files(path)[0]:
                if file.suffix != ".safetensors" and ".index." not in file.name and file.name not in _NOT_COPIED:
                    (folder / file).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path / file, folder / file)
    words = f"{real.model_type}, {count} of {layers} layers, at least one of each kind"
    return words, [*_unreached(model, config)]


def _files_of(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    weights = [f"*.{suffix}" for suffix in ("safetensors", "bin", "pt", "pth", "gguf", "h5", "msgpack", "onnx")]
    return Path(snapshot_download(name, ignore_patterns=weights))


def _smallest(real: Any, name: str, trusted: bool) -> tuple[Any, int, int]:
    """Return a configuration with as many first layers of the real model as are needed to include each kind of layer;
    also the number of these layers, and the number of the real model's layers."""
    layers, why = real.get_text_config(decoder=True).num_hidden_layers, ""
    every = _kinds(_narrow(real, layers, layers), layers, trusted)
    for count in range(min(2, layers), layers + 1):
        try:
            small = _narrow(real, layers, count)
            if every <= _kinds(small, count, trusted):
                return small, count, layers
        except (StrictDataclassError, *REFUSALS) as error:
            why = first_line(error)  # for example, a pattern that needs more layers
    raise UserError(f"--model {name}: no small model can be made from its configuration ({why})")


def _narrow(real: Any, layers: int, count: int) -> Any:
    """Return a narrow configuration with the first `count` of the real model's `layers` layers."""
    content = real.to_dict()
    content.pop("quantization_config", None)
    small = type(real).from_dict(dict(_values(content, layers, count, "")))
    small.name_or_path = real.name_or_path  # where the model's own code is, if it has any
    return small


def _kinds(settings: Any, count: int, trusted: bool) -> set[Any]:
    """Return the kinds of layers of a model with `count` layers. A kind is a layer's modules, parameter shapes, and the
    modules' attributes that are booleans or strings."""
    import torch

    with torch.device("meta"):
        model = class_of(settings, images=True).from_config(settings, trust_remote_code=trusted)
    kinds = set()
    for part in model.modules():
        for layer in part if isinstance(part, torch.nn.ModuleList) and len(part) == count else ():
            modules = [(name, type(inner).__name__, *_switches(inner)) for name, inner in layer.named_modules()]
            kinds.add((*modules, *((name, tuple(p.shape)) for name, p in layer.named_parameters())))
    return kinds


def _switches(module: Any) -> Iterator[tuple[str, bool | str]]:
    return ((key, value) for key, value in sorted(vars(module).items()) if isinstance(value, (bool, str)))


def _values(content: Mapping[str, Any], layers: int, count: int, inside: str) -> Iterator[tuple[str, Any]]:
    heads, few = content.get("num_attention_heads"), content.get("num_key_value_heads")
    for key, value in content.items():
        if isinstance(value, dict) and "rope" in key:
            yield key, _rope(value, content)
        elif isinstance(value, dict):
            yield key, dict(_values(value, layers, count, key))
        elif key == "num_key_value_heads" and isinstance(value, int):
            yield key, _HEADS if few == heads else min(value, 2)
        elif key == "num_heads":  # in vision towers, or in state-space models (`expand`), whose heads fill the width
            yield key, _STATE_HEADS if "expand" in content else min(value, _HEADS)
        elif key in _LAYERS and isinstance(value, int):
            yield key, count if value == layers else min(value, 2)
        elif key in _SIZE_OF and value and type(value) in (int, float):
            yield key, _SIZE_OF[key]
        elif _is_by_layer(key, value) and len(value) == layers and not inside.startswith("vision"):
            yield key, value[:count]
        elif isinstance(value, list) and key.endswith(_BY_LAYER):
            yield key, [number for number in value if not isinstance(number, int) or number < count] or value[:1]
        else:
            yield key, value


def _is_by_layer(key: Any, value: Any) -> bool:
    """Whether a value may have one entry per layer: a pattern (`M-M*`, not `silu`), or a list (not of tokens)."""
    name = str(key)  # keys of labels are numbers
    return "pattern" in name if isinstance(value, str) else isinstance(value, list) and "token" not in name


def _rope(value: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of rotary positions, with lists as long as half of a narrow head's width."""
    half = int(_HEAD * (content.get("partial_rotary_factor") or value.get("partial_rotary_factor") or 1)) // 2
    first = max(half // 4, 1)
    rest = (half - first) // 2
    narrow: dict[str, Any] = {}
    for key, setting in value.items():
        if isinstance(setting, dict):
            narrow[key] = _rope(setting, content)
        elif key == "mrope_section":
            narrow[key] = [half - 2 * rest, rest, rest]
        else:
            narrow[key] = setting[:half] if isinstance(setting, list) else setting
    return narrow


def _unreached(model: Any, config: TrainConfig) -> Iterator[Finding]:
    """Warn of experts that `--lora-target-modules` names but does not reach, because they are tensors, not layers."""
    experts = [name for name, weights in model.named_parameters() if weights.ndim == 3 and "expert" in name]
    modules, parameters = (names_of(value) for value in (config.lora_target_modules, config.lora_target_parameters))
    missed = [n for n in experts if n.rsplit(".", 1)[-1] in modules and not any(map(n.endswith, parameters))]
    if missed and config.adapter != "none":
        what = f"--lora-target-modules does not reach {', '.join(alike(missed))}, which are tensors, not layers"
        inside = ",".join(dict.fromkeys(name.split(".", 3)[-1] for name in missed))
        yield warns(what, f"--lora-target-parameters {inside} adapts the experts")
