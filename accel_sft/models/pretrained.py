"""Loads a model from saved weights, unsharded, sharded or offloaded, and refuses incomplete files."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.io import cache
from accel_sft.launch import host_memory
from accel_sft.launch.accelerator import own_folder
from accel_sft.launch.environment import device_count
from accel_sft.models.architecture import alike, beyond_text, parts_of, without_adapter
from accel_sft.models.kernels import in_4bit, keep_as_trained
from accel_sft.models.source import errors_explained, hub_place

_NAMED = 4
_DEQUANTIZED = ("mxfp4", "fp8", "compressed-tensors")
"""Kinds of quantized checkpoints that transformers can dequantize on loading, so that the weights can be trained."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
_ALONE = "only the language model of these multimodal weights is loaded and exported; to serve an adapter, merge it"
_EXACT = """
    colwise colwise_gather_output colwise_rep embedding_rowwise rowwise rowwise_rep rowwise_split_input
"""
"""Tensor-parallel styles of transformers 5.23 that give the same loss and gradients as a single process
(tests/launch/test_tensor_parallel.py). `replicated_with_grad_allreduce` does not: after a step's second backward, it
counts the gradient of the first backward once per rank."""
LOWEST_TORCH = "2.7"
"""Lowest torch version for transformers' tensor parallelism, which passes `src_data_rank` to distribute_tensor()."""
_INSTEAD = "train with accelerate_configs/z3.yaml, which shards any model's weights"
_WEIGHTS_SHARE = 0.75
"""Share of free GPU and host memory that weights may fill under --offload; activations and KV cache need the rest."""
OR_NONE = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
"""Arguments of transformers' cached_file that make it return None for a file that the model does not have."""


def pretrained(
    name: str,
    config: TrainConfig,
    dtype: torch.dtype,
    *,
    largest_id: int,
    train: bool,
    log: Callable[[str], None],
    images: bool = False,
    tensor_ranks: int = 1,
    offload: str | None = None,
) -> Any:
    """Return the model of a folder or a hub id, without an adapter. The arguments are as in `load_model`."""
    from transformers import AutoConfig

    settings = AutoConfig.from_pretrained(name, trust_remote_code=config.trust_remote_code)
    text = settings.get_text_config(decoder=True)
    if problem := vocabulary_problem(name, text, largest_id):
        raise UserError(problem)
    quantized = getattr(settings, "quantization_config", None)
    kind = class_of(settings, images=images)
    if tensor_ranks > 1:
        check_plan(name, settings, kind, tensor_ranks, images=images)
    if train and isinstance(quantized, dict) and quantized.get("quant_method") in _DEQUANTIZED:
        quantized["dequantize"] = True
    model, loading_info = kind.from_pretrained(
        name,
        config=settings,
        dtype=dtype,
        attn_implementation=config.attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `_refuse_incomplete` names these weights
        trust_remote_code=config.trust_remote_code,
        **(in_4bit(name, settings, dtype) if config.load_in_4bit else {}),
        **(cut_over(tensor_ranks) if tensor_ranks > 1 else {}),
        **(placing(offload) if offload else {}),
    )
    # under ZeRO-3, transformers 5.23 keeps renamings that no file needed; they would rename weights in exports
    if renamed := getattr(model, "_weight_conversions", None):
        model._weight_conversions = [conversion for conversion in renamed if conversion.was_used()]
    if place := hub_place(name):  # the hub id, not the folder in this machine's cache
        model.name_or_path = place[0]
    if config.load_in_4bit:
        keep_as_trained(model)
        log("the base's linear layers are in 4 bits (NF4)")
    _refuse_incomplete(name, loading_info)
    if quantized and not hasattr(model.config, "quantization_config"):
        # otherwise saving would give dequantized weights the names of quantized ones
        vars(model).pop("_weight_conversions", None)
        if dtype == torch.float32:  # transformers 5.21 leaves dequantized experts in another dtype
            model.float()
    if offload:
        places = Counter({"cpu": "host", "disk": "disk"}.get(str(to), "GPU") for to in model.hf_device_map.values())
        log(f"where the model's parts are: {', '.join(f'{count} on the {place}' for place, count in places.items())}")
    if text is not settings and not isinstance(model.config, type(settings)):
        log(_ALONE)
    elif unused := sorted(loading_info["unexpected_keys"]):
        log(f"not loaded, because config.json does not describe them: {len(unused)} weights ({_named(unused)})")
    return model


def vocabulary_problem(name: str, text: Any, largest_id: int) -> str | None:
    """Why a model with this text configuration cannot read token `largest_id` or its pad token; None if it can."""
    largest_id, size = max(largest_id, getattr(text, "pad_token_id", None) or 0), getattr(text, "vocab_size", math.inf)
    if largest_id < size:
        return None
    return (
        f"--model {name}: its tokenizer has token id {largest_id}, but the model's vocabulary ends at {size - 1}; use "
        "the model's own tokenizer, or call resize_token_embeddings()"
    )


def text_settings(name: str, *, trust_remote_code: bool) -> Any:
    """Return the text part of a model's configuration; no weights are loaded."""
    from transformers import AutoConfig

    with errors_explained(name):
        settings = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code)
    return settings.get_text_config(decoder=True)


def stored_dtype(settings: Any) -> torch.dtype:
    """Return the dtype of a model's weights according to its configuration; float32 if the configuration has none."""
    # a model's own code may use the name `dtype` for something else
    named = getattr(settings.get_text_config(decoder=True), "dtype", None) or getattr(settings, "dtype", None)
    return named if isinstance(named, torch.dtype) else torch.float32


def auto_class(model: torch.nn.Module) -> Any:
    """Return transformers' auto class that loads this model's weights."""
    base = without_adapter(model)
    made_by = (auto for auto in _classes() if isinstance(base, auto._model_mapping.get(type(base.config), ())))
    return next(made_by, None) or class_of(base.config)


def class_of(settings: Any, *, images: bool = False) -> Any:
    """Return the auto class that loads a model of this configuration: AutoModelForCausalLM if it supports the model,
    else AutoModelForImageTextToText. With `images`, the second class is tried first."""
    classes = _classes()
    in_order = classes[::-1] if images else classes
    return next((auto for auto in in_order if type(settings) in auto._model_mapping), classes[0])


def _classes() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForCausalLM, AutoModelForImageTextToText


def _refuse_incomplete(name: str, loading_info: dict[str, Any]) -> None:
    """Raise UserError if weights are missing from the files: transformers would initialize them randomly."""
    mismatched = loading_info["mismatched_keys"]
    shapes = [f"{key} {tuple(in_file)} for {tuple(expected)}" for key, in_file, expected in mismatched]
    for verb, keys in (("lack", loading_info["missing_keys"]), ("do not match config.json in the shapes of", shapes)):
        if keys:
            weights = f"{len(keys)} of the model's weights ({_named(sorted(keys))})"
            raise UserError(f"--model {name}: its files {verb} {weights}; name complete files, or fix config.json")


def _named(keys: list[str]) -> str:
    return f"{', '.join(keys[:_NAMED])}{', ...' if len(keys) > _NAMED else ''}"


def freeze_beyond_text(
    model: torch.nn.Module, log: Callable[[str], None], *, images: bool = False, pattern: str | None = None
) -> None:
    """Freeze the parameters that text never passes through, such as the vision tower's; images still pass through them.
    With `images`, parameters whose names match the regular expression `pattern` stay trainable."""
    left = pattern if images else None
    frozen = []
    for name, weights in beyond_text(model).items():
        if weights.requires_grad and not (left is not None and re.search(left, name)):
            weights.requires_grad_(False)
            frozen.append(name)
    if frozen:
        log(f"not trained, because text does not pass through it: {', '.join(parts_of(frozen))}")


def freeze_others(model: Any, pattern: str, log: Callable[[str], None], new_tokens: Sequence[int] = ()) -> None:
    """Freeze all trained parameters except those whose names match the regular expression (`--train-only`), and log the
    trained ones. A tied head has the name of its embedding."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    trained = {name for name in names if re.search(pattern, name)}
    if not trained:
        raise UserError(f"--train-only {pattern}: no weight's name matches; names are like {names[0]} and {names[-1]}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    if new_tokens and not model.get_input_embeddings().weight.requires_grad:
        raise UserError(
            f"--train-only {pattern} leaves out the embeddings of {len(new_tokens)} tokens that --chat-template adds; "
            "make the pattern match them too (such as embed_tokens)"
        )
    log(f"--train-only trains {', '.join(alike(name for name in names if name in trained))}")


def would_train(name: str, config: TrainConfig, log: Callable[[str], None], images: bool, new: Sequence[int]) -> None:
    """Log which weights `--train-only` trains, and raise the errors that training would raise; loads no weights."""
    from transformers import AutoConfig

    trusted = {"trust_remote_code": config.trust_remote_code}
    with errors_explained(name), torch.device("meta"):
        settings = AutoConfig.from_pretrained(name, **trusted)
        model = class_of(settings, images=images).from_config(settings, **trusted)
    freeze_beyond_text(model, log, images=images, pattern=config.train_only)
    freeze_others(model, str(config.train_only), log, new)


def processor_files(name: str, model: torch.nn.Module) -> list[Path]:
    """Return a multimodal model's files that configure the preprocessing of images and other media; else []."""
    from transformers.utils import cached_file

    paths = [cached_file(name, file, **OR_NONE) for file in _PROCESSOR_FILES] if beyond_text(model) else []
    return [Path(path) for path in paths if path]


def check_plan(name: str, settings: Any, kind: Any, ranks: int, *, images: bool) -> None:
    """Raise UserError if tensor parallelism cannot split a model with these settings, loaded by the auto class `kind`,
    among `ranks` ranks."""
    text = settings.get_text_config(decoder=True)
    of_class = getattr(kind._model_mapping.get(type(settings), None), "_tp_plan", None) or {}
    plan, problem = dict(getattr(text, "base_model_tp_plan", None) or {}), None
    heads = {"num_attention_heads": "attention heads", "num_key_value_heads": "heads of keys and values"}
    counts = [(getattr(text, key, None), what) for key, what in heads.items()]
    uneven = [f"{count} {what}" for count, what in counts if isinstance(count, int) and count % ranks]
    if images:
        problem = "the data has images, and plans split language models only"
    elif not plan:
        problem = "transformers has no plan (base_model_tp_plan) for its class"
    elif unknown := sorted({*plan.values(), *of_class.values()} - {*_EXACT.split()}):
        problem = f"its plan has styles that are not known to be exact ({', '.join(unknown)})"
    elif uneven:
        problem = f"its {' and '.join(uneven)} cannot be divided among {ranks} ranks"
    elif getattr(settings, "quantization_config", None):
        problem = "its weights are quantized"
    if problem:
        raise UserError(f"--model {name}: tensor parallelism cannot split this model: {problem}; {_INSTEAD}")


def cut_over(ranks: int) -> dict[str, Any]:
    """Return from_pretrained's arguments that make each rank load only its part under the tensor-parallel plan."""
    if Version(torch.__version__) < Version(LOWEST_TORCH):
        versions = f"torch {LOWEST_TORCH} or newer, but {torch.__version__} is installed"
        raise UserError(f"tensor parallelism needs {versions}; {_INSTEAD}")
    from transformers.distributed import DistributedConfig

    return {"distributed_config": DistributedConfig(tp_size=ranks)}


def refuse_offload(where: str | None, *, ranks: int, quantized: bool) -> None:
    """Raise UserError if a model cannot be offloaded to `where`."""
    if where is None:
        return
    if ranks > 1:
        raise UserError("--offload works in a single process only; start the command without accelerate launch")
    if quantized:
        raise UserError("--offload: 4-bit weights cannot be offloaded; omit the option, or name unquantized weights")
    if where == "host" and not device_count():
        raise UserError("--offload host: there is no GPU here, so all weights are in host memory anyway; use disk")


def placing(where: str) -> dict[str, Any]:
    """Return from_pretrained's arguments that make accelerate fill the GPU with weights, keep the rest on `where` (host
    or disk), and move each layer's weights to the GPU for its forward. Weights that must be converted on loading, such
    as merged experts, go to a folder in the cache, which is removed when the process ends."""
    folder = {"offload_folder": str(own_folder(cache.folder() / "offload"))}
    if not device_count():
        return {"device_map": {"": "disk"}, **folder}
    free = int(_WEIGHTS_SHARE * torch.cuda.mem_get_info()[0])
    host = int(_WEIGHTS_SHARE * host_memory.free_bytes()) if where == "host" else 0
    return {"device_map": "auto", "max_memory": {torch.cuda.current_device(): free, "cpu": host}, **folder}
