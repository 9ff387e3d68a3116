"""Writes exported configurations so that libraries with other keys, such as transformers 4, read the same values."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from accel_sft.io.files import read_json

_OWN = {"auto_map", "quantization_config", "compression_config"}
"""Keys of the base model's configuration whose values may be wrong for the exported weights."""
_OF_ROPE = "rope_theta", "partial_rotary_factor"


def complete_config(folder: Path, dtype: str | None, base: Mapping[str, Any]) -> None:
    """Complete config.json. Write the `dtype` of the exported weights, also for the model's parts: transformers writes
    the type that the model has in memory. Also write settings under older keys, and the settings of `base`'s
    config.json: if a key were missing, transformers 4 would silently use its default."""

    def within(part: dict[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
        if part.get("model_type") != before.get("model_type"):
            before = before.get("text_config") or {}  # the language model of a multimodal base
        complete = {key: value for key, value in before.items() if key not in _OWN and not key.startswith("_")} | part
        complete |= {key: dtype for key in ("dtype", "torch_dtype") if dtype and isinstance(complete.get(key), str)}
        rope = part.get("rope_parameters") or {}
        by_layer = any(isinstance(value, dict) for value in rope.values())  # older libraries know two kinds of layers
        full = (rope.get("full_attention") or {}) if by_layer else rope
        complete |= {key: full[key] for key in _OF_ROPE if key in full}
        scaling = {key: value for key, value in full.items() if key not in _OF_ROPE}
        if full and scaling != {"rope_type": "default"}:
            complete["rope_scaling"] = scaling
        if by_layer and (local := rope.get("sliding_attention")):
            complete["rope_local_base_freq"] = local["rope_theta"]
        parts = [key for key in part if isinstance(part[key], dict) and "model_type" in part[key]]
        return complete | {key: within(part[key], before.get(key) or {}) for key in parts}

    _rewrite(folder / "config.json", lambda config: within(config, base))


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files, with the names for its class and its control tokens that transformers 4 and 5 know."""
    tokenizer.save_pretrained(str(folder))

    def named(config: dict[str, Any]) -> dict[str, Any]:
        if config.get("tokenizer_class") == "TokenizersBackend":
            config["tokenizer_class"] = "PreTrainedTokenizerFast"
        if isinstance(config.get("extra_special_tokens"), list):
            config["additional_special_tokens"] = config.pop("extra_special_tokens")
        return config

    _rewrite(folder / "tokenizer_config.json", named)


def _rewrite(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    if file.is_file():
        file.write_text(json.dumps(change(read_json(file)), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
