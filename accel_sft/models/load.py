"""Loads the model of a `Source` in stages: weights in the dtype to use, new tokens, the adapter, what is trained."""

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.launch.environment import device_count
from accel_sft.models.adapters import is_of_whole, leave_casts_to_autocast, new_adapter, saved_adapter
from accel_sft.models.kernels import compile_blocks
from accel_sft.models.new_tokens import know_tokens
from accel_sft.models.pretrained import freeze_beyond_text, freeze_others, pretrained
from accel_sft.models.source import Source, errors_explained, hub_place
from accel_sft.models.tokenizer import load_tokenizer, stop_at_ends


def load_model(
    source: Source,
    config: TrainConfig,
    *,
    precision: str,
    deepspeed: bool,
    total_steps: int = 0,
    largest_id: int = 0,
    log: Callable[[str], None] = lambda line: None,
    images: bool = False,
    tensor_ranks: int = 1,
    tokenizer: Any = None,
    new_tokens: Sequence[int] = (),
    offload: str | None = None,
) -> Any:
    """Return the model with its adapter, in the dtype to use and ready for Accelerator.prepare.

    Args:
        deepspeed: whether DeepSpeed keeps the float32 copy of the weights; if so, the model is loaded in `precision`.
        total_steps: optimizer steps to come; 0 for evaluation only: saved adapters stay frozen, and none is added.
        largest_id: the largest token id that the model will read.
        tensor_ranks: number of ranks among which tensor parallelism splits each matrix.
        tokenizer: its end tokens stop generation, and those of its tokens that the weights lack get embeddings.
        new_tokens: ids that `--chat-template` added to the tokenizer; a new adapter trains their embeddings.
        offload: where to keep weights that do not fit on the GPU, "host" or "disk"; only for evaluation.
    """
    train = total_steps > 0
    _refuse_settings(source, config, train=train, tensor_ranks=tensor_ranks, offload=offload)
    adds_tokens = tokenizer is not None and (source.adds_tokens or config.chat_template is not None)
    with errors_explained(source.weights):
        reduced = deepspeed or config.adapter != "none" or not train
        model = pretrained(
            source.weights,
            config,
            _dtype(dtype=config.dtype, precision=precision if reduced else "no"),
            largest_id=0 if adds_tokens else largest_id,
            train=train,
            log=log,
            images=images or bool(source.adapter and is_of_whole(source.adapter)),
            tensor_ranks=tensor_ranks,
            offload=offload,
        )
        if adds_tokens:
            seed = config.seed if source.rows_seed is None else source.rows_seed
            know_tokens(model, tokenizer, seed, log, new_tokens or _unknown_tokens(source, config, tokenizer))
        if tokenizer is not None:
            stop_at_ends(model, tokenizer, log)
    if source.adapter:
        with errors_explained(source.adapter):
            model = saved_adapter(model, source.adapter, config, train=train, new_tokens=new_tokens)
    elif config.adapter != "none" and train:
        torch.manual_seed(config.seed)  # the same new adapter on every rank and at every ZeRO stage
        model = new_adapter(model, config, total_steps, log, new_tokens=new_tokens)
        if config.revision and (place := hub_place(source.weights)):
            model.active_peft_config.revision = place[1]
    freeze_beyond_text(model, log, images=images, pattern=config.train_only if train else None)
    if train:
        _make_trainable(model, config, log, new_tokens, autocast=precision != "no" and not deepspeed)
    return model


def _refuse_settings(
    source: Source, config: TrainConfig, *, train: bool, tensor_ranks: int, offload: str | None
) -> None:
    """Raise UserError for settings that the source or this machine does not support."""
    if source.adapter and tensor_ranks > 1:
        raise UserError(
            f"--model {source.adapter}: tensor parallelism does not split adapters; merge this one (accel-sft merge)"
        )
    if source.adapter and offload:
        raise UserError(f"--offload: {source.adapter} is an adapter; merge it first (accel-sft merge)")
    attention = config.attn_implementation or ""
    if attention == "flex_attention" and train and not device_count():
        raise UserError("--attn-implementation flex_attention has no backward on a CPU; use sdpa, or omit the option")
    if "flash" in attention and not device_count():
        raise UserError(f"--attn-implementation {attention} needs a GPU for its kernels; use sdpa, or omit the option")
    if not (attention or config.trust_remote_code):
        _refuse_kernels(source.weights)


def _refuse_kernels(name: str) -> None:
    """Raise UserError if the model's configuration has attention computed by code on the hub (ORG/REPO)."""
    from transformers import PreTrainedConfig

    with errors_explained(name):
        content, _ = PreTrainedConfig.get_config_dict(name)
    if kernel := re.search(r'_implementation": (?:{[^}]*)?"([^"}]+/[^"]+)"', json.dumps(content)):
        raise UserError(
            f"--model {name}: its attention is computed by code on the hub, {kernel[1]}; choose --attn-implementation "
            "sdpa, or read that code and pass --trust-remote-code"
        )


def _dtype(*, dtype: str, precision: str) -> torch.dtype:
    reduced = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return reduced.get(precision, torch.float32) if dtype == "auto" else getattr(torch, dtype)


def _unknown_tokens(source: Source, config: TrainConfig, tokenizer: Any) -> Collection[int]:
    """Return `tokenizer`'s ids that the weights' own tokenizer lacks; () for an adapter, which has their embeddings."""
    if source.adapter:
        return ()
    base = Source(source.weights, source.weights)
    own = load_tokenizer(base, trust_remote_code=config.trust_remote_code, templated=False)
    return {*tokenizer.get_vocab().values()} - {*own.get_vocab().values()}


def _make_trainable(
    model: Any, config: TrainConfig, log: Callable[[str], None], new_tokens: Sequence[int], *, autocast: bool
) -> None:
    """Freeze the weights that `--train-only` leaves out, and set up gradient checkpointing and compilation."""
    text = model.config.get_text_config()
    if (coefficient := getattr(text, "router_aux_loss_coef", 0)) and getattr(text, "output_router_logits", False):
        log(f"router_aux_loss_coef {coefficient:g} is ignored: the loss has no term for the balance of experts")
    if config.train_only is not None:
        freeze_others(model, config.train_only, log, new_tokens)
    if autocast:
        leave_casts_to_autocast(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.adapter != "none":
            model.enable_input_require_grads()
    if config.compile:
        compile_blocks(model)


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return the number of trained parameters and that of all parameters, counted unsharded even under ZeRO-3."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)
