"""The adapter types that `--adapter` offers; one is added by an entry here and its peft part in models/adapters.py."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterType:
    """What settings and launch need to know of an adapter type.

    Attributes:
        saved_settings: keys of peft's `adapter_config.json` that never change in an adapter, each with the field of
            `TrainConfig` that must agree with it when the adapter is trained further.
        mergeable: whether its weights can be added to those of the linear layers that it adapts.
        launch_problems: why it cannot be trained on a backend and what to do, by accelerate's name of the backend.
    """

    saved_settings: Mapping[str, str]
    mergeable: bool = True
    launch_problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


_SAVED = {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_VARIANTS = {"use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
ADAPTERS: dict[str, AdapterType] = {
    "lora": AdapterType(
        saved_settings={"r": "lora_r", **_SAVED, **_VARIANTS, "target_parameters": "lora_target_parameters"}
    ),
    "adalora": AdapterType(
        saved_settings={"target_r": "lora_r", **_SAVED},
        launch_problems={
            "DEEPSPEED": "it ranks its directions by each step's gradients, which DeepSpeed frees; "
            "launch with accelerate_configs/ddp.yaml, or choose --adapter lora"
        },
    ),
}
"""Adapter types by name, which is peft's name of the type in lower case."""

LORA_ONLY = ("use_rslora", "use_dora", "lora_init", "lora_modules_to_save", "lora_target_parameters", "load_in_4bit")
"""Settings of how LoRA's layers are made. They apply to peft's LoRA alone, and can be combined unless `conflicts`
objects."""
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings that every adapter type has; without an adapter they do nothing."""
SPLITS = ("pissa", "olora")
"""Values of `--lora-init` that start the adapter as a part of its base's weights and subtract that part from them."""


def names_of(text: str | None) -> list[str]:
    """The comma-separated names in an option's text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def unused(config: Any, defaults: Any) -> list[str]:
    """Names of the adapter settings that were chosen although there is no adapter.

    Args:
        config: a `TrainConfig`.
        defaults: `TrainConfig` itself, or another object with the default of each setting.
    """
    without = OF_ADAPTERS if config.adapter == "none" else ()
    return [name for name in without if getattr(config, name) != getattr(defaults, name)]


def conflicts(config: Any, defaults: Any) -> list[str]:
    """Adapter settings that cannot be combined, one line each.

    Args:
        config: a `TrainConfig`.
        defaults: `TrainConfig` itself, or another object with the default of each setting.
    """
    given = [name for name in LORA_ONLY if getattr(config, name) != getattr(defaults, name)]
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    found = []
    if config.adapter != "lora":
        return [f"{flag}: it is a property of LoRA; add --adapter lora, or leave it out" for flag in flags.values()]
    if config.lora_init in SPLITS:
        others = [name for name in given if name not in ("lora_init", "lora_modules_to_save", "lora_target_parameters")]
        found += [
            f"--lora-init {config.lora_init}: with {flags[name]} its export would need another base than the original "
            "one; leave one of the two out"
            for name in others
        ]
    if names_of(config.lora_target_parameters):
        if config.use_dora:
            found.append("--lora-target-parameters: peft adapts parameters without DoRA; leave --use-dora out")
        if config.lora_dropout:
            found.append("--lora-target-parameters: peft adapts parameters without dropout; set --lora-dropout 0")
        if config.lora_init != "default":
            found.append("--lora-target-parameters: --lora-init is for linear layers; leave one of the two out")
    return found
