"""Reads the shape of the model that `--model` names from its configuration, without its weights; a model of an unknown
family is built on the meta device."""

import dataclasses
import functools
import json
import math
import re
from pathlib import Path
from typing import Any

from accel_sft.api.config import no_match
from accel_sft.api.errors import UserError, first_line
from accel_sft.api.options import shown
from accel_sft.io.files import read_json
from accel_sft.memory.families import count, text_config
from accel_sft.memory.job import BYTES
from accel_sft.memory.recurrent import kept_bytes
from accel_sft.memory.shape import Block, Kept, Matrix, ModelShape
from accel_sft.memory.vision import tower

_MOST_LAYERS, _MOST_WIDE = 10_000, 2**31
_SIZES = {"num_hidden_layers": _MOST_LAYERS, "hidden_size": _MOST_WIDE, "vocab_size": _MOST_WIDE}
_SIZES |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _MOST_WIDE)
"""Largest value that config.json may give each size; a model with more layers could not be built in reasonable time."""


class UnusableModel(UserError):
    """config.json has sizes that no model can have."""


def read_shape(config: dict[str, Any], name: str, folder: Path | None = None) -> ModelShape:
    """The shape of a model with this configuration, counted in closed form where its family is known.

    Args:
        config: the content of config.json.
        name: as the user named the model, for errors.
        folder: where the weight files are, if they are on this machine.
    Raises:
        UserError: the family is unknown, and transformers cannot build the model.
    """
    stored = stored_parameters(folder) if folder else None
    return count(config, stored) or on_meta_device(config, name)


def stored_parameters(folder: Path) -> int | None:
    """Parameter count by the headers of a folder's safetensors files; None without files or if one cannot be read."""
    from safetensors import SafetensorError, safe_open

    total = 0
    try:
        for file in folder.glob("*.safetensors"):
            with safe_open(file, framework="np") as opened:
                total += sum(math.prod(opened.get_slice(name).get_shape()) for name in opened.keys())  # noqa: SIM118
    except (SafetensorError, OSError):
        return None
    return total or None


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json.

    Raises:
        UserError: it cannot be read, or is no object.
        UnusableModel: it has sizes that no model can have.
    """
    content = read_json(folder / "config.json")
    if not isinstance(content, dict):
        raise UserError(f"{folder}/config.json: expected an object; name a folder of saved weights")
    wrong = [
        f"{folder}/config.json: {name} {shown(str(text[name]))}: expected a whole number from 1 to {most:,}; put the "
        "model's own file back"
        for text in (content, text_config(content)[0])
        for name, most in _SIZES.items()
        if isinstance(text.get(name), (str, int, float)) and not (type(text[name]) is int and 1 <= text[name] <= most)
    ]
    if wrong:
        raise UnusableModel(*dict.fromkeys(wrong))
    return content


def stored_bytes(config: dict[str, Any]) -> int:
    """Bytes of an element in the weight files, as config.json names their type; 2 where it does not."""
    named = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    return BYTES.get(str(named).removeprefix("torch."), 2)


def on_meta_device(config: dict[str, Any], name: str) -> ModelShape:
    """Build a model of any family that transformers knows, without memory, in seconds; return its shape. Imports torch.

    Raises:
        UserError: transformers is not installed, or cannot build the model.
    """
    return _walked(_built(config, name))


def matching(config: dict[str, Any], name: str, pattern: str | None) -> tuple[int, int, int] | None:
    """Number of elements that `--train-only` trains: those in the blocks' matrices, and all others; and the number of a
    vision tower's blocks that a gradient goes through. None without it.

    Raises:
        UserError: it matches no parameter's name, or the model cannot be built.
    """
    if pattern is None:
        return None
    model = _built(config, name)
    ends = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings()) if part}
    found = [p for key, p in model.named_parameters() if re.search(pattern, key)]
    if not found:
        raise UserError(no_match(pattern, (key for key, _ in model.named_parameters())))
    matrices = sum(p.numel() for p in found if p.ndim == 2 and id(p) not in ends)
    return matrices, sum(p.numel() for p in found) - matrices, _kept_blocks(model, {id(p) for p in found})


def _kept_blocks(model: Any, trained: set[int]) -> int:
    """Number of a vision tower's blocks that keep activations: from the first with a trained parameter on, or from the
    first of all where what comes before is trained."""
    import torch

    text = {id(p) for p in model.get_decoder().parameters()}
    order = {id(p): at for at, p in enumerate(model.parameters()) if id(p) not in text}
    first = min((at for key, at in order.items() if key in trained), default=len(order))
    every = (each for each in model.modules() if isinstance(each, torch.nn.ModuleList) and len(each))
    lists = [each for each in every if text.isdisjoint(map(id, each.parameters()))]
    blocks = max(lists, key=len, default=())
    return sum(any(order[id(p)] >= first for p in block.parameters()) for block in blocks)


def _built(config: dict[str, Any], name: str) -> Any:
    """The model of a configuration on the meta device."""
    kind = config.get("model_type")
    try:
        import torch
        from accelerate import init_empty_weights
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        raise UserError(
            f"--model {name}: model_type {kind}: counting its parameters needs transformers: {error}"
        ) from None
    try:
        # transformers writes infinity, which JSON lacks, as {"__float__": "Infinity"}: Granite 4's limit of time steps
        decoded = json.loads(json.dumps(config), object_hook=lambda d: float(d["__float__"]) if "__float__" in d else d)
        settings = AutoConfig.for_model(**decoded)
        auto: Any = next(
            (
                each
                for each in (AutoModelForCausalLM, AutoModelForImageTextToText)
                if type(settings) in each._model_mapping
            ),
            AutoModelForCausalLM,
        )
        with init_empty_weights(include_buffers=True), torch.device("meta"):
            model = auto.from_config(settings)
    except Exception as error:  # noqa: BLE001 - a library's error on a stranger's configuration is the user's to read
        reason = first_line(error)
        raise UserError(f"--model {name}: model_type {kind}: its parameters cannot be counted: {reason}") from None
    return model


def _walked(model: Any) -> ModelShape:
    """The shape of a built model: its longest list of blocks, its embeddings, and what is left."""
    import torch

    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [each for each in decoder.modules() if isinstance(each, torch.nn.ModuleList) and len(each)]
    blocks = max(lists, key=lambda each: sum(p.numel() for p in each.parameters()), default=())
    active = getattr(text, "num_experts_per_tok", None)
    counted: dict[Block, int] = {}
    for module in blocks:
        block = _block(module, active, text)
        counted[block] = counted.get(block, 0) + 1
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head is None or head.weight is embedding.weight or bool(getattr(text, "tie_word_embeddings", False))
    inside = {id(p) for part in (decoder, embedding, head) if part is not None for p in part.parameters()}
    in_blocks = {id(p) for block in blocks for p in block.parameters()}
    ends = {id(embedding.weight)} | ({id(head.weight)} if head is not None else set())
    beside = sum(p.numel() for p in model.parameters() if id(p) in inside - in_blocks - ends)
    heads = getattr(text, "num_attention_heads", 1) or 1
    return ModelShape(
        family=str(model.config.model_type),
        hidden_size=embedding.weight.shape[1],
        vocab_size=embedding.weight.shape[0],
        heads=heads,
        key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or embedding.weight.shape[1] // heads,
        tied=tied,
        blocks=tuple(dataclasses.replace(b, count=n, recurrent=_measured(b.recurrent)) for b, n in counted.items()),
        vectors=beside,
        other=sum(p.numel() for p in model.parameters() if id(p) not in inside),
        tower=tower(eyes.to_dict()) if (eyes := getattr(model.config, "vision_config", None)) else None,
        source="the model built without memory by transformers",
    )


def _block(module: Any, active: int | None, config: Any) -> Block:
    """One block: its linear layers and experts as matrices, the rest as vectors.

    Args:
        active: number of experts that a token is sent to; None without experts.
        config: the text configuration.
    """
    import torch

    matrices: list[Matrix] = []
    vectors = 0
    scans = [each for each in module.modules() if any(isinstance(part, torch.nn.Conv1d) for part in each.children())]
    in_scans = {id(p) for each in scans for p in each.parameters()}
    for name, parameter in module.named_parameters():
        owner, _, own = name.rpartition(".")
        layer = module.get_submodule(owner)
        is_linear = isinstance(layer, torch.nn.Linear)
        if own == "bias" and is_linear:  # a bias is counted with its matrix
            continue
        if parameter.ndim not in (2, 3):
            vectors += parameter.numel()
            continue
        copies = parameter.shape[0] if parameter.ndim == 3 else 1
        outputs, inputs = parameter.shape[-2:]
        matrix = Matrix(
            name=owner.rpartition(".")[2] if is_linear else own if copies > 1 else owner.rpartition(".")[2],
            inputs=inputs,
            outputs=outputs,
            group="recurrent" if id(parameter) in in_scans else _group(name, is_linear, copies),
            bias=is_linear and layer.bias is not None,
            copies=copies,
            active=min(active or copies, copies),
            is_linear=is_linear,
            lora_ranks=int(is_linear),
        )
        matrices.append(matrix)
    recurrent = tuple(functools.partial(kept_bytes, each, config) for each in scans)
    return Block(count=1, matrices=tuple(matrices), vectors=vectors, recurrent=recurrent)


def _measured(recurrent: tuple[Kept, ...]) -> tuple[Kept, ...]:
    """The measurements of a block's layers with a state, each made once; () if one cannot be made."""
    cached = tuple(map(functools.cache, recurrent))
    try:
        for each in cached:
            each(4, 1, 2)
    except Exception:  # noqa: BLE001 - packages' kernels run on GPUs alone; they keep little but inputs and outputs
        return ()
    return cached


def _group(name: str, is_linear: bool, copies: int) -> str:
    if copies > 1 or (".experts." in f".{name}" and "shared" not in name):
        return "experts"
    if "attn" in name or "attention" in name:
        return "attention"
    return "feed_forward" if is_linear else "experts"  # otherwise a router
