"""A run's folder, its checkpoints (complete or not there) and the weights it hands out (law 3)."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from accel_sft.api.errors import UserError
from accel_sft.checkpoint import shards
from accel_sft.checkpoint.capacity import check_disk
from accel_sft.io import manifest
from accel_sft.io.files import abandoned, write_atomically
from accel_sft.io.heartbeat import heartbeat
from accel_sft.launch.describe import parallelism

POINTER = "latest"
"""The file beside the checkpoints that names the newest; written last."""


@contextlib.contextmanager
def replacing(accelerator: Accelerator, target: Path) -> Iterator[Path]:
    """A folder beside `target` to fill from all ranks; it takes `target`'s place when it is whole and on the disk.

    What a kill leaves behind is put right by `settle`.
    """
    partial = target.with_name(f".{target.name}.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    accelerator.wait_for_everyone()
    yield partial
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        for path in (*partial.rglob("*"), partial):
            manifest.sync(path)
        outgoing = target.with_name(f".{target.name}.outgoing")
        shutil.rmtree(outgoing, ignore_errors=True)
        if target.exists():
            target.rename(outgoing)
        partial.rename(target)
        manifest.sync(target.parent)
        shutil.rmtree(outgoing, ignore_errors=True)
    accelerator.wait_for_everyone()


def settle(run_dir: Path) -> None:
    """Put right what a kill amid `replacing` left: the old folder back where the new one had not come yet. And take
    away files that were being written."""
    for folder in (run_dir, run_dir / "checkpoints", run_dir / "samples"):
        for temporary in abandoned(folder):
            temporary.unlink()
        for outgoing in folder.glob(".*.outgoing"):
            target = folder / outgoing.name.removeprefix(".").removesuffix(".outgoing")
            if target.exists():
                shutil.rmtree(outgoing)
            else:
                outgoing.rename(target)
        for partial in folder.glob(".*.partial"):
            shutil.rmtree(partial)


def save(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: Any,
    run_dir: Path,
    state: dict[str, Any],
    keep: int,
    extra: shards.Extra | None = None,
) -> Path:
    """Write `checkpoints/step-<step>`: what training has changed, by parameter, and `state`; prune after.

    Frozen weights are left out: the run's source still has them. Random state is none to keep: a step's is made from
    the seed, the step and the rank.

    Args:
        state: JSON-able, with the key `step`.
        keep: newest checkpoints left.
        extra: tensors that training needs besides, equal on all ranks; `load_extra` reads them.
    """
    target = run_dir / "checkpoints" / f"step-{state['step']:06d}"
    check_disk(accelerator, model, run_dir)
    about = {**state, "layout": parallelism(accelerator), "loss_scale": shards.loss_scale(accelerator, model)}
    with replacing(accelerator, target) as partial:
        shards.write(accelerator, model, optimizer, partial, extra)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            manifest.write(partial, about)
    if accelerator.is_main_process:
        write_atomically(target.parent / POINTER, target.name + "\n")
        # later ones are damaged, or of a run that was resumed from before them: they do not count as newest
        for old in [path for path in checkpoints(run_dir) if _step(path) <= state["step"]][:-keep]:
            shutil.rmtree(old)
    return target


def checkpoints(run_dir: Path) -> list[Path]:
    """The run's checkpoint folders, oldest first."""
    found = (run_dir / "checkpoints").glob("step-*")
    return sorted((path for path in found if path.name.removeprefix("step-").isdecimal()), key=_step)


def has_trained(run_dir: Path) -> bool:
    """Whether the folder holds what a run has learnt, which no other settings may go on with or take the place of."""
    return bool(checkpoints(run_dir)) or (run_dir / "final").is_dir()


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def newest(run_dir: Path, resume: str) -> tuple[Path | None, list[str]]:
    """The checkpoint to continue from, if any, and one line for each that was passed over and why.

    Args:
        resume: "auto", or a checkpoint's folder.
    Raises:
        UserError: the named checkpoint is not there or not whole.
    """
    if resume != "auto":
        if defect := _defect(Path(resume)):
            raise UserError(f"--resume {resume}: {defect}")
        return Path(resume), []
    skipped: list[str] = []
    for path in reversed(checkpoints(run_dir)):
        defect = _defect(path)
        if defect is None:
            return path, skipped
        skipped.append(f"{path}: passed over: {defect}")
    if skipped:
        raise UserError(
            *skipped, f"{run_dir}: none of its checkpoints is whole; to start over, name another --output-dir"
        )
    return None, []


def undo_after(run_dir: Path, step: int) -> list[Path]:
    """Put aside the checkpoints of later steps, which a run that goes on from an earlier one makes anew; where to."""
    moved = []
    for path in checkpoints(run_dir):
        if _step(path) > step:
            aside = path.with_name(f"undone-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            moved.append(path.rename(aside))
    return moved


def _defect(path: Path) -> str | None:
    try:
        manifest.verify(path)
    except manifest.Damaged as damage:
        return str(damage)
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    return None


def load(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any, path: Path) -> dict[str, Any]:
    """Put weights and optimizer back, written under whatever layout; the `state` that was saved with them.

    Raises:
        UserError: it was written under another precision, or is of another model.
    """
    state = manifest.read(path)
    before, here = state["layout"].get("precision"), parallelism(accelerator)["precision"]
    if before != here:
        raise UserError(
            f"{path}: written under precision {before}, and this launch has {here}: the same steps would compute other "
            f"numbers; resume it with --mixed_precision {before}, or start a new run from its weights with --init-from"
        )
    shards.read(accelerator, model, optimizer, path)
    shards.set_loss_scale(accelerator, model, state.get("loss_scale"))
    return state


def load_extra(path: Path) -> shards.Extra:
    """The `extra` tensors that `save` was given."""
    return shards.read_extra(path)


def export(accelerator: Accelerator, model: Any, tokenizer: Any, target: Path, card: str) -> None:
    """Write what plain transformers (full weights) or peft (the adapter alone) load, tokenizer and card beside it.

    Gathers from all ranks under ZeRO-3 and FSDP; for an adapter only its own weights.
    """
    unwrapped = accelerator.unwrap_model(model)
    adapter = hasattr(unwrapped, "peft_config")
    weights = _adapter_weights(accelerator, unwrapped) if adapter else accelerator.get_state_dict(model)
    with replacing(accelerator, target) as partial:
        if accelerator.is_main_process:
            unwrapped.save_pretrained(str(partial), state_dict=weights)
            tokenizer.save_pretrained(str(partial))
            (partial / "README.md").write_text(card, encoding="utf-8")


def _adapter_weights(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            heartbeat()
            with _gathered(parameter):
                if accelerator.is_main_process:
                    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
                    weights[name] = whole.detach().to("cpu", copy=True)
    return weights


def _gathered(parameter: torch.nn.Parameter) -> contextlib.AbstractContextManager:
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([parameter])
