"""Adds adapters, new or saved, to a model, and holds the peft code of each adapter type.

To add an adapter type, add an entry to `TYPES` here and to `ADAPTERS` in api/limits.py.
"""

import contextlib
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from safetensors import safe_open

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line
from accel_sft.api.limits import ADAPTERS, names_of
from accel_sft.api.options import flag_of
from accel_sft.io.files import read_json
from accel_sft.models.new_tokens import rows_made, trained_beside, use_rows
from accel_sft.models.targets import ALL_LINEAR, left_out, targets

ExtraState = Mapping[str, Mapping[str, torch.Tensor]]
"""Tensors of a training run that are neither weights nor optimizer state: kind -> name -> tensor."""


class Reads(NamedTuple):
    """Which trained weights `after_step` uses: a substring of their names, and whether their gradients are read too."""

    name_part: str
    gradients: bool


class Adapter:
    """The peft code of an adapter type. The base class is that of LoRA (Hu et al., 2021), which needs no hooks."""

    def config(self, settings: TrainConfig, total_steps: int, common: dict[str, Any]) -> Any:
        """Return the PeftConfig of a new adapter. `common` holds arguments that the PeftConfig of every type takes."""
        from peft import LoraConfig

        return LoraConfig(r=settings.lora_r, use_rslora=settings.use_rslora, use_dora=settings.use_dora, **common)

    def reads(self, model: Any, step: int) -> Reads | None:
        """Return which weights to gather for `after_step`; None if `after_step` is not to be called in this step."""
        return None

    def after_step(self, model: Any, step: int, weights: Mapping[str, torch.Tensor]) -> Collection[str]:
        """Called after optimizer step `step` (from 0) if the gradient was finite. `weights` are the weights that the
        optimizer updates, with clipped gradients, unsharded and equal on all ranks (and in float32 even if forwards
        compute in lower precision). Return the names of the weights that were changed in place."""
        return ()

    def extra_state(self, model: Any) -> ExtraState:
        """Return what a checkpoint must hold in addition to weights and optimizer state."""
        return {}

    def set_extra_state(self, model: Any, state: ExtraState, device: torch.device) -> None:
        """Restore the result of `extra_state`. `device` is the device of the weights passed to `after_step`."""


class AdaLora(Adapter):
    """AdaLoRA (Zhang et al., 2023): between a tenth and two thirds of the run, ranks shrink from 1.5 r to r."""

    KINDS = ("ipt", "exp_avg_ipt", "exp_avg_unc")
    """Attributes in which peft's rank allocator keeps an importance for each element of the adapter's weights."""

    def config(self, settings: TrainConfig, total_steps: int, common: dict[str, Any]) -> Any:
        from peft import AdaLoraConfig

        return AdaLoraConfig(
            init_r=settings.lora_r * 3 // 2 + 1,
            target_r=settings.lora_r,
            tinit=total_steps // 10,
            tfinal=total_steps // 3,
            deltaT=10,
            total_step=total_steps,
            **common,
        )

    def reads(self, model: Any, step: int) -> Reads | None:
        """Until the ranks are final, return all adapter weights, whose gradients change the importances. After that,
        return only the singular values, which are masked again after each step."""
        config, allocator = self._allocation(model)
        final = config.total_step - config.tfinal
        return Reads("lora_", step < final) if step <= final or allocator.ipt else Reads("lora_E", False)

    def after_step(self, model: Any, step: int, weights: Mapping[str, torch.Tensor]) -> Collection[str]:
        """Let peft's rank allocator read `weights` instead of the model's parameters, which may be sharded."""
        from peft import AdaLoraModel

        base = model.base_model
        config, allocator = self._allocation(model)
        final = config.total_step - config.tfinal
        if step > final and allocator.ipt:  # the step that fixes the ranks was skipped: fix them now
            step = final
        prefix = "base_model.model."  # the allocator's names lack this prefix of the model's names
        named = {name.removeprefix(prefix): weight for name, weight in weights.items()}
        seen: Any = SimpleNamespace(
            model=SimpleNamespace(named_parameters=named.items),
            peft_config=base.peft_config,
            trainable_adapter_name=base.trainable_adapter_name,
            rankallocator=allocator,
        )
        AdaLoraModel.update_and_allocate(seen, step)
        masks = step >= final or allocator.budget_schedule(step)[1]
        return [name for name in weights if masks and "lora_E" in name]

    def _allocation(self, model: Any) -> tuple[Any, Any]:
        base = model.base_model
        return base.peft_config[base.trainable_adapter_name], base.rankallocator

    def extra_state(self, model: Any) -> ExtraState:
        """Return the rank allocator's importances, and the mask of the ranks that it keeps."""
        allocator = model.base_model.rankallocator
        ranks = getattr(allocator.peft_config, "rank_pattern", None) or {}
        return {
            **{kind: {name: tensor.cpu() for name, tensor in getattr(allocator, kind).items()} for kind in self.KINDS},
            "rank_pattern": {name: torch.tensor(pattern) for name, pattern in ranks.items()},
        }

    def set_extra_state(self, model: Any, state: ExtraState, device: torch.device) -> None:
        allocator = model.base_model.rankallocator
        for kind in self.KINDS:
            setattr(allocator, kind, {name: tensor.to(device) for name, tensor in state.get(kind, {}).items()})
        if ranks := state.get("rank_pattern"):
            allocator.peft_config.rank_pattern = {name: pattern.tolist() for name, pattern in ranks.items()}


TYPES: dict[str, Adapter] = {"lora": Adapter(), "adalora": AdaLora()}
"""The peft code of each adapter type, under its name in `api.limits.ADAPTERS`."""


def type_of(model: Any) -> str | None:
    """Return the name of the model's adapter type (maybe not in TYPES); None if the model has no adapter."""
    for config in getattr(model, "peft_config", {}).values():
        return str(getattr(config.peft_type, "value", config.peft_type)).lower()
    return None


def adapter_of(model: Any) -> Adapter:
    """Return the peft code of the model's adapter type; for a type that is not in TYPES, hooks that do nothing."""
    return TYPES.get(type_of(model) or "", Adapter())


def new_adapter(
    model: Any,
    settings: TrainConfig,
    total_steps: int,
    log: Callable[[str], None],
    *,
    new_tokens: Sequence[int] = (),
) -> Any:
    """Return the model with a new adapter of the type that `--adapter` names. The adapter also trains the rows of
    `new_tokens` in the embedding and the head."""
    from peft import TaskType, get_peft_model

    names, saved = names_of(settings.lora_target_modules), names_of(settings.lora_modules_to_save)
    common = {
        "task_type": TaskType.CAUSAL_LM,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        **targets(model, names=names, saved=saved, parameters=names_of(settings.lora_target_parameters)),
        **trained_beside(model, new_tokens, [*names, *saved]),
    }
    try:
        with rows_made(model) if new_tokens else contextlib.nullcontext():
            adapted = get_peft_model(model, TYPES[settings.adapter].config(settings, total_steps, common))
    except ValueError as error:
        problem = f"peft does not adapt all of these modules ({first_line(error)}); name others"
        raise UserError(f"--lora-target-modules {settings.lora_target_modules}: {problem}") from error
    use_rows(adapted)
    if common["target_modules"] == ALL_LINEAR and (names := left_out(adapted)):
        log(f"the adapter leaves out {', '.join(names)}")
    return adapted


def leave_casts_to_autocast(model: Any) -> None:
    """Stop peft's layers from casting their inputs to the weights' dtype. Autocast would cast the inputs back, and
    autograd would keep the copies for the backward."""
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False


def saved_adapter(
    model: Any, folder: str, settings: TrainConfig, *, train: bool, new_tokens: Sequence[int] = ()
) -> Any:
    """Return the model with the adapter saved in `folder`; `--adapter none` merges the adapter before training."""
    if new_tokens and settings.adapter != "none":
        raise UserError(
            f"--chat-template: the adapter {folder} lacks {len(new_tokens)} tokens of this template; merge the adapter "
            "first (accel-sft merge), or start a new one from --model"
        )
    if not train or settings.adapter != "none":
        if train:
            _check_shape(folder, settings)
        return _with_adapter(model, folder, train)
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise UserError(
            f"--init-from: the adapter {folder} cannot be merged into weights that ZeRO-3 has sharded; "
            "train it further with --adapter lora, or launch with ZeRO stage 2"
        )
    return merged(_with_adapter(model, folder, False), folder).requires_grad_(True)


def merged(adapted: Any, folder: str) -> Any:
    """Return the model with the adapter from `folder` merged into its weights."""
    if not hasattr(adapted, "merge_and_unload"):
        raise UserError(f"{folder}: adapters of type {type_of(adapted)} cannot be merged into weights")
    return adapted.merge_and_unload()


def is_of_whole(folder: str) -> bool:
    """Whether an adapter was trained on a complete multimodal model, not only on its language model."""
    file = Path(folder, "adapter_model.safetensors")
    if not file.is_file():
        return False
    with safe_open(file, framework="pt") as weights:
        return any(".language_model." in name for name in weights.keys())  # noqa: SIM118


def _with_adapter(model: Any, folder: str, train: bool) -> Any:
    from peft import PeftModel

    with warnings.catch_warnings():  # else missing weights would be initialized as in a new adapter
        warnings.filterwarnings("error", "Found missing adapter keys")
        with rows_made(model):
            adapted = PeftModel.from_pretrained(model, folder, is_trainable=train)
    use_rows(adapted)
    return adapted


def _check_shape(folder: str, settings: TrainConfig) -> None:
    """Raise UserError for settings that differ from those of a saved adapter; peft would ignore such settings."""

    def comparable(value: Any) -> Any:
        entries = names_of(value) if isinstance(value, str) else value
        return (sorted(entries) if isinstance(entries, list) else entries) or None

    saved = read_json(Path(folder) / "adapter_config.json")
    given = {"peft_type": ("adapter", settings.adapter.upper())}
    if saved["peft_type"] == settings.adapter.upper():
        given |= {key: (field, getattr(settings, field)) for key, field in ADAPTERS[settings.adapter].items()}
    wrong = [
        f"{flag_of(field)} {value}: the adapter in {folder} has {saved.get(key)}; give that value, or omit the option"
        for key, (field, value) in given.items()
        if value is not None and comparable(saved.get(key)) != comparable(value)
    ]
    if wrong:
        raise UserError(*wrong)
