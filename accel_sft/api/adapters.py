"""The adapter types that `--adapter` offers. A new type needs an entry here and one in models/adapters.py."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterType:
    """What the checks of the settings and of the launch need to know of an adapter type.

    Attributes:
        saved_settings: what is fixed when an adapter is created: each key of peft's `adapter_config.json`, mapped to
            the field of `TrainConfig` that must have the same value when a saved adapter is trained further.
        mergeable: whether its weights can be added to those of the linear layers that it adapts.
    """

    saved_settings: Mapping[str, str]
    mergeable: bool = True


_SAVED = {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_VARIANTS = {"use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
ADAPTERS: dict[str, AdapterType] = {
    "lora": AdapterType(
        saved_settings={"r": "lora_r", **_SAVED, **_VARIANTS, "target_parameters": "lora_target_parameters"}
    ),
    "adalora": AdapterType(saved_settings={"target_r": "lora_r", **_SAVED}),
}
"""Adapter types by name, which is peft's name of the type in lower case."""

LORA_ONLY = ("use_rslora", "use_dora", "lora_modules_to_save", "lora_target_parameters", "load_in_4bit")
"""Settings that need `--adapter lora`. They can be combined, unless `conflicts` reports them."""
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings that every adapter type has; without an adapter they do nothing."""


def names_of(text: str | None) -> list[str]:
    """Return the comma-separated names in an option's text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def unused(config: Any, defaults: Any) -> list[str]:
    """Return the names of the adapter settings that were chosen although there is no adapter.

    Args:
        config: a `TrainConfig`.
        defaults: the class `TrainConfig`, or another object with the default of each setting.
    """
    without = OF_ADAPTERS if config.adapter == "none" else ()
    return [name for name in without if getattr(config, name) != getattr(defaults, name)]


def conflicts(config: Any, defaults: Any) -> list[str]:
    """Return a line for each setting that needs `--adapter lora` but lacks it, or cannot be combined with another.

    Args:
        config: a `TrainConfig`.
        defaults: the class `TrainConfig`, or another object with the default of each setting.
    """
    given = [name for name in LORA_ONLY if getattr(config, name) != getattr(defaults, name)]
    flags = {name: f"--{name.replace('_', '-')}" for name in given}
    found = []
    if config.adapter != "lora":
        return [f"{flag} works only with --adapter lora: add that, or leave {flag} out" for flag in flags.values()]
    if names_of(config.lora_target_parameters):
        if config.use_dora:
            found.append("--lora-target-parameters: peft has no DoRA for parameters; leave --use-dora out")
        if config.lora_dropout:
            found.append("--lora-target-parameters: peft has no dropout for parameters; set --lora-dropout 0")
    return found
