"""Finds the newest complete checkpoint and loads it; exports weights, completely or not at all."""

import contextlib
import shutil
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.background import Checkpoints
from accel_sft.checkpoint.shards import Averages
from accel_sft.io import manifest
from accel_sft.io.exported import complete_config, save_tokenizer
from accel_sft.io.files import abandoned, begin_folder, put_in_place, remove
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.run_dir import RunDir, step_of
from accel_sft.io.text import printable
from accel_sft.launch.describe import layout_of
from accel_sft.launch.groups import tensor_ranks
from accel_sft.launch.precision import type_in_files


def settle(run_dir: RunDir) -> None:
    """Clean up after a kill: restore a folder whose replacement was not in place yet; remove half-written files."""
    for folder in (run_dir.path, run_dir.checkpoints, run_dir.samples):
        for temporary in abandoned(folder):
            temporary.unlink()
        for outgoing in folder.glob(".*.outgoing"):
            target = folder / outgoing.name.removeprefix(".").removesuffix(".outgoing")
            if target.exists():
                remove(outgoing)
            else:
                outgoing.rename(target)
        for partial in folder.glob(".*.partial"):
            shutil.rmtree(partial)


def newest(run_dir: RunDir, resume: str) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to resume (None if there is none), and a line for each damaged checkpoint that was skipped.
    Raises UserError if the checkpoint that `--resume` names is damaged, or if every checkpoint of the run is."""
    if resume == "off":
        return None, []
    skipped: list[str] = []
    for path in reversed(run_dir.all_checkpoints()) if resume == "auto" else [Path(resume)]:
        try:
            manifest.verify(path)
            return path, skipped
        except (manifest.Damaged, OSError) as damage:
            defect = printable(str(damage))
        if resume != "auto":
            raise UserError(f"--resume {resume}: {defect}")
        skipped.append(f"{path}: skipped as damaged: {defect}")
    if skipped:
        raise UserError(*skipped, f"{run_dir}: all checkpoints are damaged; to start again, name another --output-dir")
    return None, []


def undo_after(run_dir: RunDir, step: int) -> list[Path]:
    """Rename the checkpoints of steps after `step`, which the resumed run repeats; returns the new paths."""
    moved = []
    for path in run_dir.all_checkpoints():
        if step_of(path) > step:
            aside = path.with_name(f"undone-{path.name}")
            remove(aside, ignore_errors=True)
            moved.append(path.rename(aside))
    return moved


def load(
    accelerator: Accelerator, model: Any, optimizer: Any, path: Path, averages: Averages | None = None
) -> dict[str, Any]:
    """Load weights, optimizer state and `averages` from a checkpoint of any parallelism; return its `state`."""
    state = manifest.about(path)
    if not all(isinstance(state.get(key), dict) for key in ("layout", "loss_scale")):
        raise UserError(f"{path}: not a checkpoint of accel_sft; resume another, or start a new run with --init-from")
    before, current = state["layout"].get("precision"), layout_of(accelerator)["precision"]
    if before != current:
        saved, new = ("float32" if precision == "no" else precision for precision in (before, current))
        raise UserError(
            f"{path}: this checkpoint has precision {saved}, but this launch has {new}; resume with --mixed_precision "
            f"{before}, or start a new run with --init-from"
        )
    shards.read(accelerator, model, optimizer, path, averages)
    if averages:
        averages.updates = state["averaged_steps"]
    shards.set_loss_scale(accelerator, model, state["loss_scale"])
    return state


def export(
    accelerator: Accelerator,
    model: Any,
    tokenizer: Any,
    target: Path,
    card: str,
    beside: Sequence[Path] = (),
    behind: Checkpoints | None = None,
    dtype: torch.dtype | None = None,
    base: Mapping[str, Any] = types.MappingProxyType({}),
) -> None:
    """Write all weights for plain transformers, or an adapter alone for peft, with tokenizer, model card and the files
    `beside`. If host memory has room for a copy, `behind` (if given) writes them in the background. Weights are rounded
    to `dtype`. `base` is the config.json of the model that a training of all weights started from."""
    if behind:
        behind.finish()
    unwrapped, main = accelerator.unwrap_model(model), accelerator.is_main_process
    adapter = hasattr(unwrapped, "peft_config")
    weights = _weights_to_export(accelerator, model, unwrapped, adapter=adapter)

    def fill(partial: Path) -> None:
        unwrapped.save_pretrained(str(partial), state_dict=weights)
        if not adapter:
            complete_config(partial, str(dtype).removeprefix("torch.") if dtype else None, base)
        if adapter and unwrapped.get_base_model().can_generate():  # peft saves no generation config
            unwrapped.get_base_model().generation_config.save_pretrained(str(partial))
        (partial / "README.md").write_text(card, encoding="utf-8")
        for file in beside:
            shutil.copyfile(file, partial / file.name)

    def write() -> None:
        fill(partial)
        put_in_place(partial, target)

    waits = behind is None or not behind.has_room_for(weights)
    if main:
        partial = begin_folder(target)
        save_tokenizer(tokenizer, partial)  # now, because the next evaluation uses the tokenizer
        if dtype or not waits:
            _copy(weights, unwrapped, dtype)
    if behind and not waits:
        behind.export(write if main else None)
        return
    if main:
        write()
    accelerator.wait_for_everyone()


def _copy(weights: dict[str, torch.Tensor], model: Any, dtype: torch.dtype | None) -> None:
    """Replace the weights by copies in host memory, because training changes them. Tied names still share a tensor."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in weights.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in names_of.values():
        tensor = weights[names[0]]
        kind = type_in_files(model, names[0], tensor, dtype) if dtype else tensor.dtype
        weights.update(dict.fromkeys(names, tensor.to("cpu", kind, copy=True)))


def _weights_to_export(
    accelerator: Accelerator, model: Any, unwrapped: Any, *, adapter: bool
) -> dict[str, torch.Tensor]:
    """The weights to export, by name: an adapter's or all weights; {} on ranks that do not write."""
    if adapter or tensor_ranks(accelerator) > 1:
        named = unwrapped.named_parameters() if adapter else unwrapped.state_dict(keep_vars=True).items()
        weights = _whole_weights(accelerator, ((name, p) for name, p in named if p.requires_grad or not adapter))
    elif accelerator.is_main_process or any(
        hasattr(p, "ds_id") or hasattr(p, "full_tensor") for p in unwrapped.parameters()
    ):
        weights = accelerator.get_state_dict(model) or {}  # None on other ranks under ZeRO-3
    else:
        weights = {}  # under ZeRO-1 and 2 every rank would copy the whole model to host memory
    first_names: dict[int, str] = {}
    for name, parameter in unwrapped.named_parameters(remove_duplicate=False):
        first = first_names.setdefault(id(parameter), name)
        if first != name and weights and first in weights and (adapter or name in weights):
            weights[name] = weights[first]  # FSDP gathers one copy per name of tied weights; peft looks up each name
    return weights


def _whole_weights(accelerator: Accelerator, named: Iterable[tuple[str, Any]]) -> dict[str, torch.Tensor]:
    """Gather these weights one by one, and return them by name on rank 0; {} on other ranks."""
    weights = {}
    for name, parameter in named:
        heartbeat()
        with _gathered(parameter):
            # the gather is a collective: every rank calls it
            tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if accelerator.is_main_process:
                weights[name] = tensor.detach().to("cpu", copy=True)
    return weights


def _gathered(parameter: Any) -> Any:
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    if parameter.ds_status == deepspeed.zero.partition_parameters.ZeroParamStatus.AVAILABLE:
        return contextlib.nullcontext()  # small parameters must stay gathered: the next forward relies on that
    return deepspeed.zero.GatheredParameters([parameter])
