"""Says which settings, adapter types, optimizers and launches work together, or why not. Imports no torch."""

from collections.abc import Mapping
from typing import Any

from accel_sft.api.options import chosen, flag_of

_SAVED = {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_VARIANTS = {"use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
ADAPTERS: dict[str, Mapping[str, str]] = {
    "lora": {"r": "lora_r", **_SAVED, **_VARIANTS, "target_parameters": "lora_target_parameters"},
    "adalora": {"target_r": "lora_r", **_SAVED},
}
"""Each adapter type (peft's name in lower case) maps keys of peft's `adapter_config.json` to fields of `TrainConfig`.
The keys' values are fixed when an adapter is created: to train it further, the fields must have the same values."""
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings of every adapter type; they have no effect without an adapter."""
_LORA_ONLY = ("use_rslora", "use_dora", "lora_modules_to_save", "lora_target_parameters", "load_in_4bit")
STATE_BYTES: dict[str, float] = {
    "adamw": 8,
    "adamw-8bit": 2 + 2 * 4 / 256,  # two moments: a byte per element, a float32 scale per 256
}
"""The optimizers of `--optimizer`, with the bytes of their state per trained element."""
TENSOR_PARALLEL = "TENSOR_PARALLEL"
"""The backend's name under tensor parallelism."""
_REFUSED: dict[tuple[str, Any], tuple[tuple[str, ...], str]] = {
    ("use_dora", True): (("DEEPSPEED 3",), "z2"),  # each forward reads whole weights of the base, which are sharded
    ("lora_modules_to_save", True): (("FSDP",), "z2"),  # a tied embedding and head would be sharded twice
    ("load_in_4bit", True): (("DEEPSPEED 3", "FSDP", TENSOR_PARALLEL), "z2"),  # bitsandbytes needs whole matrices
    ("optimizer", "adamw-8bit"): (("DEEPSPEED", "FSDP", TENSOR_PARALLEL), "ddp"),  # it updates whole parameters
    ("compile", True): ((TENSOR_PARALLEL,), "fsdp2"),  # ranks communicate within each layer
    ("use_liger_kernel", True): ((TENSOR_PARALLEL,), "fsdp2"),  # its kernels need whole matrices
    ("ema_decay", True): (("DEEPSPEED nvme", TENSOR_PARALLEL), "z3_offload"),  # each step would read the disk once more
    **{("adapter", name): ((TENSOR_PARALLEL,), "z2") for name in ADAPTERS},  # peft 0.21 fails on split matrices
}
"""Maps (setting, value) to the backends that do not support the value, and to a launch file that does. A backend is
accelerate's name, for some with a ZeRO stage or `nvme`. True stands for every value that switches the setting on."""


def names_of(text: str | None) -> list[str]:
    """Return the comma-separated names in an option's text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def adapter_conflicts(config: Any) -> list[str]:
    """Return a line for each setting of a `TrainConfig` that needs `--adapter lora` but is given without it, and for
    settings that peft cannot combine."""
    if config.adapter != "lora":
        flags = map(flag_of, chosen(config, _LORA_ONLY))
        return [f"{flag} works only with --adapter lora; add it, or leave {flag} out" for flag in flags]
    if names_of(config.lora_target_parameters) and (config.use_dora or config.lora_dropout):
        return ["--lora-target-parameters: peft has neither DoRA nor dropout for parameters; leave these options out"]
    return []


def launch_problem(settings: Any, backend: str, stage: int = 0, offload: str = "none") -> str | None:
    """Return why this launch cannot train with these settings (a `TrainConfig` or a `Job`), or None. `backend` is
    accelerate's name, or TENSOR_PARALLEL; `offload` is where the optimizer is offloaded to, or "none"."""
    launches = {backend, f"{backend} {stage}", f"{backend} {offload}"}
    for (name, value), (backends, instead) in _REFUSED.items():
        set_to = getattr(settings, name, None)  # a Job has only the settings that memory and speed depend on
        if launches.intersection(backends) and (bool(set_to) if value is True else set_to) == value:
            flag = flag_of(name) if value is True else f"{flag_of(name)} {value}"
            return f"{flag}: does not work with this launch; launch with accelerate_configs/{instead}.yaml"
    return None
