"""The adapter types that `--adapter` offers; one is added by an entry here and its peft part in models/adapters.py."""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdapterType:
    """What settings and launch need to know of an adapter type.

    Attributes:
        saved_settings: keys of peft's `adapter_config.json` that an adapter keeps for life, and the fields of
            `TrainConfig` that must say the same when it is trained on.
        mergeable: whether its weights can be added to those of the linear layers it stands on.
        launch_problems: why it cannot be trained on a backend and what to do, by accelerate's name of the backend.
    """

    saved_settings: Mapping[str, str]
    mergeable: bool = True
    launch_problems: Mapping[str, str] = dataclasses.field(default_factory=dict)


ADAPTERS: dict[str, AdapterType] = {
    "lora": AdapterType(saved_settings={"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}),
    "adalora": AdapterType(
        saved_settings={"target_r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"},
        launch_problems={
            "DEEPSPEED": "it ranks its directions by each step's gradients, which DeepSpeed frees; "
            "launch with accelerate_configs/ddp.yaml, or choose --adapter lora"
        },
    ),
}
"""By name: peft's name of the type in lower case."""


def launch_problem(name: str, backend: str) -> str | None:
    """Why `--adapter name` cannot be trained on this backend, in one line; None if it can."""
    problem = ADAPTERS[name].launch_problems.get(backend) if name in ADAPTERS else None
    return f"--adapter {name}: {problem}" if problem else None
