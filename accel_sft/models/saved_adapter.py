"""Puts a saved adapter onto its base, to train it further or to evaluate it; or merges it, to train all weights."""

import warnings
from pathlib import Path
from typing import Any

from safetensors import safe_open

from accel_sft.api.adapters import ADAPTERS, names_of
from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.io.files import read_json
from accel_sft.models.adapters import is_mergeable, type_of
from accel_sft.models.new_tokens import rows_made, use_rows


def saved_adapter(model: Any, folder: str, settings: TrainConfig, *, train: bool) -> Any:
    """Return the model with the adapter saved in `folder`, or with the adapter merged if all weights are to be trained.

    Raises:
        UserError: the adapter has another shape than the settings say, or cannot be added to the weights.
    """
    if not train or settings.adapter != "none":
        if train:
            _check_shape(folder, settings)
        return _with_adapter(model, folder, train)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError(
            f"--init-from: the adapter {folder} cannot be merged into weights that ZeRO-3 has sharded; "
            "train it on with --adapter lora, or launch with stage 2 or less"
        )
    adapted = _with_adapter(model, folder, False)
    if not is_mergeable(adapted):
        raise UserError(
            f"--init-from: the adapter {folder} is of type {type_of(adapted)}, which cannot be added to the weights; "
            f"start from one of {', '.join(name for name, kind in ADAPTERS.items() if kind.mergeable)}, or from --model"
        )
    return adapted.merge_and_unload().requires_grad_(True)


def is_of_whole(folder: str) -> bool:
    """Whether an adapter was trained on a multimodal model, and not on its language model alone."""
    file = Path(folder, "adapter_model.safetensors")
    if not file.is_file():
        return False
    with safe_open(file, framework="pt") as weights:
        return any(".language_model." in name for name in weights.keys())  # noqa: SIM118


def _with_adapter(model: Any, folder: str, train: bool) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():  # missing weights would start like those of a new adapter
        warnings.filterwarnings("error", "Found missing adapter keys")
        with rows_made(model):
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=train)
    use_rows(adapted)
    return adapted


def _check_shape(folder: str, settings: TrainConfig) -> None:
    """Refuse settings that differ from a saved adapter: it keeps its shape, and peft would ignore the settings."""
    saved = read_json(Path(folder) / "adapter_config.json")
    asked = {"peft_type": ("adapter", settings.adapter.upper())}
    if saved["peft_type"] == settings.adapter.upper():
        fields = ADAPTERS[settings.adapter].saved_settings
        asked |= {key: (field, getattr(settings, field)) for key, field in fields.items()}
    wrong = [
        f"--{field.replace('_', '-')} {value}: the adapter in {folder} has {saved.get(key)}; give that, or leave it out"
        for key, (field, value) in asked.items()
        if value is not None and _comparable(saved.get(key)) != _comparable(value)
    ]
    if wrong:
        raise UserError(*wrong)


def _comparable(value: Any) -> Any:
    """A value of adapter_config.json or of a setting in one form: names as a sorted list, None for nothing."""
    found = names_of(value) if isinstance(value, str) else value
    return (sorted(found) if isinstance(found, list) else found) or None
