"""Counts a model's parameters by group and block, after building it from config.json on the meta device.

Any family that transformers knows is counted in a second or two; torch's import takes most of that time.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError, first_line
from accel_sft.api.options import shown
from accel_sft.io.files import mapping, read_json
from accel_sft.memory.job import BYTES
from accel_sft.memory.shape import Block, Matrix, ModelShape, SavedBytes, tower

_MOST_LAYERS, _MOST_WIDE = 1_000, 2**31
_SIZES = {"num_hidden_layers": _MOST_LAYERS, "hidden_size": _MOST_WIDE, "vocab_size": _MOST_WIDE}
_SIZES |= dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), _MOST_WIDE)
"""Largest value that config.json may give each size; a model with more layers could not be built in reasonable time."""
_ADAPTED_EXPERTS = ("mixtral", "qwen3_moe", "qwen3_vl_moe_text")
_LORA_RANKS = {"gate": 1, "gate_up_proj": 2, "down_proj": 1}
"""Families in which LoRA on all linear layers also adapts the router and the fused experts (peft 0.21), and the ranks
that peft gives these, in multiples of --lora-r."""
_MOST_TOKENS = 1024
"""Maximum number of tokens on which a recurrent layer is measured (a multiple of usual chunk sizes); for longer rows,
the result grows in proportion."""


class UnusableModel(UserError):
    """config.json has sizes that no model can have."""


def read_shape(config: dict[str, Any], name: str) -> ModelShape:
    """The shape of the model that transformers builds from this config.json; `name` is for errors. Imports torch."""
    return _walked(_built(config, name))


def read_config(folder: Path) -> dict[str, Any]:
    """The content of a folder's config.json."""
    content = read_json(folder / "config.json")
    if not isinstance(content, dict):
        raise UserError(f"{folder}/config.json: expected an object; name a folder of saved weights")
    wrong = [
        f"{folder}/config.json: {name} {shown(str(text[name]))}: expected a whole number from 1 to {most:,}; put the "
        "model's own file back"
        for text in (content, mapping(content.get("text_config")))
        for name, most in _SIZES.items()
        if isinstance(text.get(name), (str, int, float)) and not (type(text[name]) is int and 1 <= text[name] <= most)
    ]
    if wrong:
        raise UnusableModel(*dict.fromkeys(wrong))
    return content


def stored_bytes(config: dict[str, Any]) -> int:
    """Bytes of an element in the weight files, by the dtype in config.json; 2 if there is no known dtype."""
    named = config.get("dtype") or config.get("torch_dtype") or (config.get("text_config") or {}).get("dtype")
    return BYTES.get(str(named).removeprefix("torch."), 2)


def _built(config: dict[str, Any], name: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.modeling_utils import set_zero3_state

    try:
        # JSON lacks infinity; transformers writes it as {"__float__": "Infinity"}, as in Granite 4's configuration
        decoded = json.loads(json.dumps(config), object_hook=lambda d: float(d["__float__"]) if "__float__" in d else d)
        settings = AutoConfig.for_model(**decoded)
        autos: list[Any] = [AutoModelForCausalLM, AutoModelForImageTextToText]
        classes = [auto._model_mapping[type(settings)] for auto in autos if type(settings) in auto._model_mapping]
        if not classes:
            raise ValueError("transformers knows no language model of this type")
        of_model = classes[0][0] if isinstance(classes[0], tuple) else classes[0]
        # from_config, which some models call for their parts, would shard them under ZeRO-3 and wait for other ranks
        with torch.device("meta"), set_zero3_state():
            return of_model(settings)
    except Exception as error:  # noqa: BLE001 - any error that a library raises here is shown to the user
        why = f"its parameters cannot be counted: {first_line(error)}"
        raise UserError(f"--model {name}: model_type {config.get('model_type')}: {why}") from None


def _walked(model: Any) -> ModelShape:
    """The shape of a built model: its largest list of blocks, its embeddings, and the rest."""
    import torch

    text = model.config.get_text_config(decoder=True)
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    blocks = max(lists, key=lambda modules: sum(p.numel() for p in modules.parameters()), default=())
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
    in_no_block = inside - in_blocks - ends
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
        vectors=sum(p.numel() for p in model.parameters() if id(p) in in_no_block),
        other=sum(p.numel() for p in model.parameters() if id(p) not in inside),
        tower=tower(vision.to_dict()) if (vision := getattr(model.config, "vision_config", None)) else None,
    )


def _block(module: Any, active: int | None, config: Any) -> Block:
    """One block: its linear layers and experts as matrices, the rest as vectors. A token uses `active` experts."""
    import torch

    matrices: list[Matrix] = []
    vectors, ranks = 0, _LORA_RANKS if config.model_type in _ADAPTED_EXPERTS else {}
    scans = [scan for scan in module.modules() if any(isinstance(part, torch.nn.Conv1d) for part in scan.children())]
    in_scans = {id(p) for scan in scans for p in scan.parameters()}
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
        short = own if copies > 1 and not is_linear else owner.rpartition(".")[2]
        matrices.append(
            Matrix(
                name=short,
                inputs=inputs,
                outputs=outputs,
                group="recurrent" if id(parameter) in in_scans else _group(name, is_linear, copies),
                bias=is_linear and layer.bias is not None,
                copies=copies,
                active=min(active or copies, copies),
                is_linear=is_linear,
                lora_ranks=ranks.get(short, int(is_linear)),
            )
        )
    recurrent = tuple(functools.partial(_kept_bytes, scan, config) for scan in scans)
    return Block(count=1, matrices=tuple(matrices), vectors=vectors, recurrent=recurrent)


def _kept_bytes(layer: Any, config: Any, itemsize: int, tokens: int) -> float:
    """Bytes that a row keeps in a recurrent layer, measured on the meta device. Such a layer computes in chunks: it
    keeps products within each chunk, and states between chunks."""
    import torch

    dtype, saved = torch.float32 if itemsize == 4 else torch.bfloat16, {}

    def save(tensor: Any) -> Any:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    rows, length = 2, min(tokens, _MOST_TOKENS)
    hidden = torch.empty(rows, length, config.hidden_size, dtype=dtype, device="meta").requires_grad_()
    for tensor in (hidden, *layer.to(dtype).train().parameters()):
        save(tensor)
    before = set(saved)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(hidden)
    new = (saved[key].untyped_storage().nbytes() for key in saved.keys() - before)
    return float(sum(new)) * max(tokens / _MOST_TOKENS, 1) / rows


def _measured(recurrent: tuple[SavedBytes, ...]) -> tuple[SavedBytes, ...]:
    """The measurements of a block's recurrent layers, cached; () if one of the layers cannot be measured."""
    cached = tuple(map(functools.cache, recurrent))
    try:
        for measured in cached:
            measured(4, 2)
    except Exception:  # noqa: BLE001 - other packages' kernels need a GPU; they keep little but inputs and outputs
        return ()
    return cached


def _group(name: str, is_linear: bool, copies: int) -> str:
    if copies > 1 or (".experts." in f".{name}" and "shared" not in name):
        return "experts"
    if "attn" in name or "attention" in name:
        return "attention"
    return "feed_forward" if is_linear else "experts"  # otherwise a router
