"""Chooses the layers that get an adapter: layers that text passes through and whose forward is called."""

import inspect
import re
from typing import Any

import torch
from transformers.pytorch_utils import Conv1D

from accel_sft.api.errors import UserError
from accel_sft.models.architecture import beyond_text, parts_of

ALL_LINEAR = "all-linear"


def targets(model: Any, *, names: list[str], saved: list[str], parameters: list[str]) -> dict[str, Any]:
    """Return arguments of peft's configurations for `names` (`--lora-target-modules`), `saved`
    (`--lora-modules-to-save`) and `parameters` (`--lora-target-parameters`).

    With `all-linear`, peft alone would also choose layers that text never passes through, layers that peft then
    refuses, and layers whose adapter would have no effect. The arguments exclude these layers.
    """
    beyond = beyond_text(model)
    modules = [name for name, module in model.named_modules() if not _has_any(name, module, beyond)]
    chosen = names != [ALL_LINEAR]
    if chosen and (missing := ", ".join(name for name in names if not _ends_any(modules, name))):
        linear = {name.rsplit(".", 1)[-1] for name in modules if hasattr(model.get_submodule(name), "in_features")}
        raise UserError(f"--lora-target-modules {missing}: no such module; this model has {', '.join(sorted(linear))}")
    excluded = [rf"(.*\.)?{re.escape(name)}" for name in saved]
    excluded += [rf"(model\.)?{re.escape(part)}\..*" for part in parts_of(beyond)]
    if not chosen:
        excluded += [rf"(.*\.)?{re.escape(name)}" for name in sorted(set(map(in_block, unfit(model))))]
    arguments: dict[str, Any] = {
        "target_modules": names if chosen else ALL_LINEAR,
        "exclude_modules": "|".join(excluded) or None,
    }
    shapes = {name: getattr(p, "ds_shape", p.shape) for name, p in model.named_parameters() if name not in beyond}
    matrices = [name for name, shape in shapes.items() if len(shape) in (2, 3)]
    if missing := ", ".join(name for name in parameters if not _ends_any(matrices, name)):
        experts = ", ".join(dict.fromkeys(in_block(name) for name in matrices if len(shapes[name]) == 3))
        raise UserError(
            f"--lora-target-parameters {missing}: not in this model. Its expert parameters are: {experts or 'none'}"
        )
    if missing := ", ".join(name for name in saved if not _ends_any(modules, name)):
        raise UserError(f"--lora-modules-to-save {missing}: no such module in this model; print(model) shows all")
    if twice := ", ".join(sorted({*saved} & {*names})):
        raise UserError(f"--lora-modules-to-save {twice}: it is in --lora-target-modules too; leave it out of one")
    if parameters:
        arguments["target_parameters"] = parameters
    if saved:
        arguments["modules_to_save"] = saved
        ends = model.get_input_embeddings(), model.get_output_embeddings()
        tied = None not in ends and ends[0].weight is ends[1].weight
        named = (name for name, module in model.named_modules() if any(module is end for end in ends))
        if tied and any(_ends_any([end], name) for end in named for name in saved):
            arguments["ensure_weight_tying"] = True  # embedding and head stay tied
    return arguments


def left_out(adapted: Any) -> list[str]:
    """Return the names of layers, and of tensors that hold experts, that get no adapter under all-linear."""
    from peft.tuners.lora.layer import ParamWrapper

    model = adapted.get_base_model()
    beyond = beyond_text(model)
    names = [*parts_of(beyond), *unfit(model)]
    wrapped = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    stood_on = {id(getattr(module.get_base_layer(), module.parameter_name)) for module in wrapped}
    for name, parameter in model.named_parameters():
        is_convolution = hasattr(model.get_submodule(name.rpartition(".")[0]), "kernel_size")
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO-3 flattens parameters
        if len(shape) == 3 and not (is_convolution or name in beyond or id(parameter) in stood_on):
            names.append(name)
    return list(dict.fromkeys(map(in_block, names)))


def unfit(model: Any) -> list[str]:
    """Return the names of linear layers that should get no adapter: they have a forward of their own, or the model
    uses their weights without calling them, as kernels of state-space layers do."""
    names, beyond = [], beyond_text(model)
    for name, module in model.named_modules():
        if not isinstance(module, (torch.nn.Linear, Conv1D)) or _has_any(name, module, beyond):
            continue
        parent, _, own = name.rpartition(".")
        user = type(model.get_submodule(parent))
        has_own_forward = type(module).forward not in (torch.nn.Linear.forward, Conv1D.forward)
        alone = rf"\bself\.{own}\.weight\b(?!\.(dtype|device|shape))"
        if (has_own_forward and _of_model(type(module))) or (
            _of_model(user) and re.search(alone, inspect.getsource(user))
        ):
            names.append(name)
    return names


def _of_model(kind: type) -> bool:
    """Whether a class is defined in a model's code, not in a library of layers that peft may support."""
    return kind.__module__.startswith(("transformers.models.", "transformers_modules."))


def _ends_any(names: list[str], end: str) -> bool:
    return any(f".{name}".endswith(f".{end}") for name in names)


def _has_any(name: str, module: torch.nn.Module, parameters: dict[str, Any]) -> bool:
    return any(f"{name}.{own}" in parameters for own, _ in module.named_parameters(recurse=False))


def in_block(name: str) -> str:
    """Return a name without its block's number and all before it: `mlp.up_proj` for `model.layers.3.mlp.up_proj`."""
    return re.split(r"\.\d+\.", name)[-1]
