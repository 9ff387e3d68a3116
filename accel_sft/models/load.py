"""Loads weights and tokenizer of a `Source`: in the right type, with the adapter in place, for Accelerator.prepare."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.api.launch_limits import CUT_ADAPTER
from accel_sft.chat.encoded import Rules, named_ends
from accel_sft.chat.template import no_template
from accel_sft.launch.environment import device_count
from accel_sft.models.adapters import leave_casts_to_autocast, new_adapter
from accel_sft.models.chat_template import GivenTemplate, template_of
from accel_sft.models.compiled import compile_blocks
from accel_sft.models.ends import answer_ends, stop_at_ends
from accel_sft.models.new_tokens import know_tokens
from accel_sft.models.offload import room_explained
from accel_sft.models.pretrained import OR_NONE, freeze_beyond_text, freeze_others, pretrained, text_settings
from accel_sft.models.saved_adapter import is_of_whole, saved_adapter
from accel_sft.models.source import Source, errors_explained, hub_place


def load_tokenizer(
    source: Source, *, trust_remote_code: bool, given: GivenTemplate | None = None, templated: bool = True
) -> Any:
    """The tokenizer, with a pad token (its eos token if it has no pad token of its own).

    Args:
        given: the chat template to give it.
        templated: whether it must have a chat template; raw text needs none.
    Raises:
        UserError: it cannot be loaded, or has no vocabulary, chat template or eos token.
    """
    from transformers import AutoTokenizer

    with errors_explained(source.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=trust_remote_code)
    if given:
        given.give(tokenizer)
    tokenizer.chat_template = template_of(tokenizer, source.tokenizer)
    if tokenizer.chat_template is None and templated:
        raise UserError(no_template(source.tokenizer))
    if tokenizer.chat_template is not None and not isinstance(tokenizer.chat_template, (str, dict)):
        kind = type(tokenizer.chat_template).__name__
        raise UserError(f"--model {source.tokenizer}: its chat template is {kind}, expected text; fix the tokenizer")
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {source.tokenizer}: its tokenizer names no eos_token to end an answer with")
    if not tokenizer("The answer is 1.", add_special_tokens=False)["input_ids"]:
        raise UserError(f"--model {source.tokenizer}: its tokenizer has no vocabulary; is its tokenizer.json there?")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
    """Return the model, ready for Accelerator.prepare: weights in the right type, adapter in place.

    Args:
        precision: the launch's mixed precision, "no", "bf16" or "fp16".
        deepspeed: whether DeepSpeed keeps the float32 copy (then weights are loaded in `precision`).
        total_steps: optimizer steps to come; 0 for evaluation alone: a saved adapter stays frozen, no new one is made.
        largest_id: the largest token id that the model will read.
        log: called with lines about what is not loaded or not trained.
        images: whether the model is to read images.
        tensor_ranks: number of ranks that share each matrix; each then loads its part.
        tokenizer: the tokenizer at whose ends generation stops, and whose tokens the model is to know, if
            `--chat-template` or an adapter adds some.
        new_tokens: ids that `--chat-template` added to it: a new adapter trains their embeddings.
        offload: where weights are that have no room on the GPU, "host" or "disk"; for evaluation alone.
    Raises:
        UserError: the model cannot be loaded, its files lack weights, or the adapter's settings do not fit it.
    """
    train = total_steps > 0
    if source.adapter and tensor_ranks > 1:
        raise UserError(f"--model {source.adapter}: {CUT_ADAPTER}; or merge the adapter first (accel-sft merge)")
    attention = config.attn_implementation or ""
    if attention == "flex_attention" and train and not device_count():
        raise UserError("--attn-implementation flex_attention: it has no backward on a CPU; leave it out, or use sdpa")
    if "flash" in attention and not device_count():
        raise UserError(f"--attn-implementation {attention}: its kernels need a GPU; leave it out, or use sdpa")
    if not (attention or config.trust_remote_code):
        _refuse_kernels(source.weights)
    if source.adapter and offload:
        raise UserError(
            f"--offload: the adapter {source.adapter} stands on weights that would be elsewhere; merge it first "
            "(accel-sft merge), and name the merged folder"
        )
    with errors_explained(source.weights), room_explained() if offload else contextlib.nullcontext():
        reduced = deepspeed or config.adapter != "none" or not train
        dtype = _dtype(dtype=config.dtype, precision=precision if reduced else "no")
        whole = images or bool(source.adapter and is_of_whole(source.adapter))
        grown = tokenizer is not None and (source.grown or config.chat_template is not None)
        model = pretrained(
            source.weights,
            config,
            dtype,
            largest_id=0 if grown else largest_id,
            train=train,
            log=log,
            images=whole,
            tensor_ranks=tensor_ranks,
            offload=offload,
        )
    if grown:
        added: Collection[int] = new_tokens
        if not (added or source.adapter):  # the weights as they were before a template was given
            base = Source(source.weights, source.weights)
            own = load_tokenizer(base, trust_remote_code=config.trust_remote_code, templated=False)
            added = {*tokenizer.get_vocab().values()} - {*own.get_vocab().values()}
        know_tokens(model, tokenizer, config.seed if source.rows_seed is None else source.rows_seed, log, added)
    if tokenizer is not None:
        with errors_explained(source.weights):
            stop_at_ends(model, tokenizer, log)
    if source.adapter:
        if new_tokens and config.adapter != "none":
            raise UserError(
                f"--chat-template: {len(new_tokens)} of its tokens are new to the adapter {source.adapter}, which has "
                "no rows for them; merge it first (accel-sft merge), or start a new adapter from --model"
            )
        with errors_explained(source.adapter):
            model = saved_adapter(model, source.adapter, config, train=train)
    elif config.adapter != "none" and train:
        torch.manual_seed(config.seed)  # the same new adapter on every rank and at every ZeRO stage
        model = new_adapter(model, config, total_steps, log, images=images, new_tokens=new_tokens)
        if config.revision and (place := hub_place(source.weights)):
            model.active_peft_config.revision = place[1]
    freeze_beyond_text(model, log, images=images, pattern=config.train_only if train else None)
    if train and config.train_only is not None:
        freeze_others(model, config.train_only, log, new_tokens)
    if train and precision != "no" and not deepspeed:
        leave_casts_to_autocast(model)
    if train and config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.adapter != "none":
            model.enable_input_require_grads()
    if train and config.compile:
        compile_blocks(model, log)
    return model


def _refuse_kernels(name: str) -> None:
    """Raise UserError if the model's configuration names code on a hub, as ORG/REPO, to compute attention with."""
    from transformers import PreTrainedConfig

    def named(value: Any, key: str = "") -> Iterator[str]:
        for inner, part in value.items() if isinstance(value, dict) else ():
            yield from named(part, key if key.endswith("_implementation") else inner)
        if isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            yield value

    with errors_explained(name):
        content, _ = PreTrainedConfig.get_config_dict(name)
    for kernel in named(content):
        raise UserError(
            f"--model {name}: its config.json has attention computed by code of a hub, {kernel}; choose "
            "--attn-implementation sdpa, or read that code, then pass --trust-remote-code"
        )


def _dtype(*, dtype: str, precision: str) -> torch.dtype:
    reduced = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return reduced.get(precision, torch.float32) if dtype == "auto" else getattr(torch, dtype)


def parameter_counts(model: torch.nn.Module) -> tuple[int, int]:
    """Return the number of trained weights and that of all weights (in whole tensors, even if ZeRO-3 shards them)."""
    sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
    return sum(size for size, learns in sizes if learns), sum(size for size, _ in sizes)


def encoding_rules(tokenizer: Any, source: Source, config: TrainConfig) -> Rules:
    """Return the rules of tokenization besides the tokenizer, such as ids that end a turn and the maximum length."""
    from transformers import GenerationConfig
    from transformers.utils import cached_file

    generation = None  # a model may have no such file; then only the tokenizer's eos ends answers
    with errors_explained(source.weights):
        if cached_file(source.weights, "generation_config.json", **OR_NONE):
            generation = GenerationConfig.from_pretrained(source.weights)
    served = generation or text_settings(source.weights, trust_remote_code=config.trust_remote_code)
    ends = frozenset(answer_ends(tokenizer, generation))
    if wrong := [token for token in ends if type(token) is not int]:
        raise UserError(f"--model {source.weights}: generation_config.json: eos_token_id {wrong[0]!r} is no number")
    assert config.max_length is not None  # the settings are resolved
    assert config.thinking is not None
    assert config.control_tokens is not None
    return Rules(
        ends,
        config.max_length,
        config.truncation,
        thinking=config.thinking,
        day=config.template_date,
        control_tokens=config.control_tokens,
        served_ends=frozenset(named_ends(served)),
    )
