"""Which settings, adapter types, optimizers and launches go together, and why others do not. Needs no torch."""

from collections.abc import Mapping
from typing import Any

from accel_sft.api.options import chosen, flag_of

_SAVED = {"lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
_VARIANTS = {"use_rslora": "use_rslora", "use_dora": "use_dora", "modules_to_save": "lora_modules_to_save"}
ADAPTERS: dict[str, Mapping[str, str]] = {
    "lora": {"r": "lora_r", **_SAVED, **_VARIANTS, "target_parameters": "lora_target_parameters"},
    "adalora": {"target_r": "lora_r", **_SAVED},
}
"""Adapter types by peft's name in lower case, each with what is fixed when one is created: keys of peft's
`adapter_config.json`, and the fields of `TrainConfig` that must have the same value when it is trained further."""
OF_ADAPTERS = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules")
"""Settings that every adapter type has; without an adapter they do nothing."""
_LORA_ONLY = ("use_rslora", "use_dora", "lora_modules_to_save", "lora_target_parameters", "load_in_4bit")
STATE_BYTES: dict[str, float] = {
    "adamw": 8,
    "adamw-8bit": 2 + 2 * 4 / 256,  # two moments: each a byte an element, and a float32 scale for 256 elements
}
"""The optimizers of `--optimizer`, with the bytes of their state for each trained element."""
TENSOR_PARALLEL = "TENSOR_PARALLEL"
"""Stands for the backend's name where each matrix is cut over the ranks."""
_CUT = "it takes whole matrices, which tensor parallelism has cut; launch with accelerate_configs/ddp.yaml"
CUT_ADAPTER = (
    "peft 0.21 fails on the cut matrices of tensor parallelism; launch with accelerate_configs/z2.yaml or z3.yaml"
)
_SHARDED = "which ZeRO-3 has sharded by then; launch stage 2 or less"
_SETTINGS: dict[tuple[str, Any], Mapping[str, str]] = {
    ("use_dora", True): {"DEEPSPEED 3": f"each forward reads whole weights of the base, {_SHARDED}"},
    ("lora_modules_to_save", True): {
        "FSDP": "a matrix that is both embedding and head would be shared out twice; launch with "
        "accelerate_configs/ddp.yaml or z2.yaml"
    },
    ("load_in_4bit", True): {
        "DEEPSPEED 3": f"bitsandbytes computes with whole weights in 4 bits, {_SHARDED}",
        "FSDP": "its weights in 4 bits are no shards to compute with; launch with accelerate_configs/ddp.yaml or "
        "z2.yaml",
        TENSOR_PARALLEL: _CUT,
    },
    ("optimizer", "adamw-8bit"): {
        "DEEPSPEED": "it steps whole parameters, and DeepSpeed slices of them; launch with "
        "accelerate_configs/ddp.yaml, or choose --optimizer adamw",
        "FSDP": "bitsandbytes steps whole parameters, and FSDP has shards of them; launch with "
        "accelerate_configs/ddp.yaml, or choose --optimizer adamw",
        TENSOR_PARALLEL: _CUT,
    },
    ("compile", True): {TENSOR_PARALLEL: "ranks exchange within each layer; launch with accelerate_configs/fsdp2.yaml"},
    ("use_liger_kernel", True): {TENSOR_PARALLEL: _CUT},
    ("ema_decay", True): {
        "DEEPSPEED nvme": "every step would read the weights that are offloaded to the disk once more; offload them to "
        "the host (accelerate_configs/z3_offload.yaml)",
        TENSOR_PARALLEL: _CUT,
    },
    **{("adapter", name): {TENSOR_PARALLEL: CUT_ADAPTER} for name in ADAPTERS},
}
"""Maps (setting, value) to backends (accelerate's name, perhaps with a ZeRO stage or `nvme`) and to why they cannot.
The value True stands for any value that switches the setting on."""


def names_of(text: str | None) -> list[str]:
    """Return the comma-separated names in an option's text."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def adapter_conflicts(config: Any) -> list[str]:
    """Return a line for each setting of a `TrainConfig` that needs `--adapter lora` but lacks it, or that peft cannot
    combine with another."""
    if config.adapter != "lora":
        flags = map(flag_of, chosen(config, _LORA_ONLY))
        return [f"{flag} works only with --adapter lora: add that, or leave {flag} out" for flag in flags]
    lines = []
    if names_of(config.lora_target_parameters) and config.use_dora:
        lines.append("--lora-target-parameters: peft has no DoRA for parameters; leave --use-dora out")
    if names_of(config.lora_target_parameters) and config.lora_dropout:
        lines.append("--lora-target-parameters: peft has no dropout for parameters; set --lora-dropout 0")
    return lines


def launch_problem(settings: Any, backend: str, stage: int = 0, offload: str = "none") -> str | None:
    """Return why this launch cannot train with these settings, in one line; None if it can.

    Args:
        settings: a `TrainConfig`, or a `Job` of the plan.
        backend: accelerate's name of the backend, or TENSOR_PARALLEL.
        stage: the ZeRO stage, under DeepSpeed.
        offload: where the optimizer is offloaded to.
    """
    for (name, value), problems in _SETTINGS.items():
        set_to = getattr(settings, name, None)  # a Job has only what memory and speed depend on
        kinds_of_launch = (backend, f"{backend} {stage}", f"{backend} {offload}")
        why = next(filter(None, map(problems.get, kinds_of_launch)), None)
        if why and (bool(set_to) if value is True else set_to) == value:
            return f"{flag_of(name)}: {why}" if value is True else f"{flag_of(name)} {value}: {why}"
    return None
