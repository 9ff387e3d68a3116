"""PiSSA and OLoRA: a LoRA that begins as a part of its base's weights, while the base keeps the rest.

A file of the run holds the adapter's first values. With it, a resumed run subtracts the same bits from the weights, as
a new decomposition might not; and an export subtracts the first values from the trained adapter, so that plain peft can
add the difference to the original base.
"""

from pathlib import Path
from typing import Any

import torch

from accel_sft.api.errors import UserError

_NAME = "default"
"""Name that peft gives to the only adapter."""


def split(adapted: Any, kind: str, start: Path | None) -> None:
    """Make an untrained LoRA begin as the part of the weights that `kind` names, and subtract that part from them.

    Args:
        kind: `pissa` (Meng et al., 2024: the largest singular values) or `olora` (Büyükakyüz, 2024: the first columns
            of a QR decomposition).
        start: the file that `keep` wrote, to take the matrices from; None: decompose the weights.
    Raises:
        UserError: the adapter is on other layers than plain linear ones, or its rank is larger than a layer allows.
    """
    from peft.tuners.lora import Linear
    from safetensors.torch import load_file

    layers = {name: layer for name, layer in adapted.named_modules() if _NAME in getattr(layer, "lora_A", {})}
    unfit = [name for name, layer in layers.items() if not isinstance(layer, Linear) or layer.fan_in_fan_out]
    if unfit:
        raise UserError(
            f"--lora-init {kind}: it is for plain linear layers, and the adapter also stands on {unfit[0]}; name "
            "layers by --lora-target-modules, or leave it out"
        )
    most = min(min(layer.in_features, layer.out_features) for layer in layers.values())
    if most < (rank := adapted.peft_config[_NAME].r):
        raise UserError(
            f"--lora-r {rank}: --lora-init {kind} takes at most {most} directions out of this model's layers"
        )
    stored = load_file(start) if start else None
    for name, layer in layers.items():
        base, matrices = layer.get_base_layer(), _matrices(name, layer)
        original = base.weight.data
        if stored is None:
            base.weight.data = original.clone()  # a copy: peft subtracts in place, with other rounding than below
            layer.pissa_init(_NAME, kind) if kind == "pissa" else layer.olora_init(_NAME)
        else:
            for key, parameter in matrices.items():
                parameter.data = stored[key].to(parameter.device)
        base.weight.data = (original.float() - layer.get_delta_weight(_NAME).float()).to(original.dtype)


def keep(adapted: Any, file: Path) -> None:
    """Write an untrained adapter's matrices to `file`, under the names that its saved weights will have."""
    from safetensors.torch import save_file

    parts = [_matrices(name, layer) for name, layer in adapted.named_modules() if _NAME in getattr(layer, "lora_A", {})]
    tensors = {key: parameter.detach().cpu().contiguous() for part in parts for key, parameter in part.items()}
    partial = file.with_name(f".{file.name}.partial")
    save_file(tensors, partial)
    partial.replace(file)


def _matrices(name: str, layer: Any) -> dict[str, torch.nn.Parameter]:
    return {f"{name}.{own}.weight": getattr(layer, own)[_NAME].weight for own in ("lora_A", "lora_B")}
