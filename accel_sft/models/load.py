"""Finds and loads weights and tokenizer: of a folder, a hub, an earlier run, or the built-in tiny model."""

import contextlib
import dataclasses
import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError
from accel_sft.data.chat import Rules, end_of_turn_ids
from accel_sft.io.files import read_json
from accel_sft.io.run_dir import RunDir
from accel_sft.launch.info import device_count
from accel_sft.models.adapters import new_adapter, saved_adapter

_SAMPLES, _SAMPLE_BYTES = 1 << 14, 1 << 12


@dataclasses.dataclass(frozen=True)
class Source:
    """What to load: full weights with their tokenizer, and the adapter that stands on them, if any."""

    weights: str
    tokenizer: str
    adapter: str | None = None


def find_source(config: TrainConfig, model: str | None = None) -> Source:
    """The source that `--model` (or `model`) or `--init-from` names.

    A folder may hold full weights, an adapter (its base is read from `adapter_config.json`), or a run.

    Raises:
        UserError: a folder that is not there or holds neither.
    """
    name = model or config.init_from or config.model
    folder = Path(name).expanduser()
    if (run := RunDir(folder)).record.is_file():
        if not run.final.is_dir():
            raise UserError(f"{name}: this run has no final/ yet; resume it first, or name one of its folders")
        folder = run.final
    if (folder / "adapter_config.json").is_file():
        adapter = read_json(folder / "adapter_config.json")
        base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        if not isinstance(base, str) or not base:
            raise UserError(
                f"{folder}/adapter_config.json: base_model_name_or_path is missing; name the adapter's base"
            )
        beside = RunDir(folder.parent.resolve()).base
        if not Path(base).exists() and (beside / "config.json").is_file():  # the run was moved
            base = str(beside)
        elif Path(base).is_absolute() and not Path(base).exists():
            raise UserError(f"{folder}: its base {base} is gone; put it back, or name it in adapter_config.json")
        return Source(base, str(folder), str(folder))
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{name}: no config.json or adapter_config.json in this folder; it is not a saved model")
        return Source(str(folder.resolve()), str(folder))
    if config.init_from and not model:
        raise UserError(f"--init-from {name}: no such run; give the folder of a finished run or of saved weights")
    if not name or folder.is_file() or name.startswith((".", "/", "~")):
        raise UserError(f"--model {name!r}: no such folder; name a hub id, a folder of saved weights, or a run")
    return Source(name, name)


def weights_identity(source: Source) -> str | None:
    """A hash that differs between full weights of the same name and shape in a folder; None for a hub id.

    SHA-256 of the configuration and of the weight files' names, sizes and content. Of a large file 64 MiB
    are read, evenly spread: training changes every matrix, and reading all takes as long as loading the model.

    Raises:
        UserError: they cannot be read.
    """
    folder = Path(source.weights)
    if not folder.is_dir():
        return None
    with _errors_explained(source.weights):
        digest = hashlib.sha256((folder / "config.json").read_bytes())
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb", buffering=0) as file:
                for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def is_tiny(config: TrainConfig) -> bool:
    """Whether what is trained is the built-in model, fresh or from an earlier run of it."""
    model, init_from, seen = config.model, config.init_from, set()
    while isinstance(init_from, str) and init_from:
        run = RunDir(Path(init_from).expanduser())
        if init_from in seen or not run.record.is_file():  # a record may name any run, itself too
            return False
        seen.add(init_from)
        earlier = run.read_record()["config"]
        model, init_from = earlier.get("model"), earlier.get("init_from")
    return model == "tiny"


def load_tokenizer(source: Source, config: TrainConfig) -> Any:
    """The tokenizer, with a pad token (its end-of-turn token if it has none of its own).

    Raises:
        UserError: it cannot be loaded, or has no chat template or end-of-turn token.
    """
    from transformers import AutoTokenizer

    with _errors_explained(source.tokenizer):
        tokenizer = AutoTokenizer.from_pretrained(source.tokenizer, trust_remote_code=config.trust_remote_code)
    if tokenizer.chat_template is None:
        raise UserError(
            f"--model {source.tokenizer}: its tokenizer has no chat template; use an instruction-tuned model, "
            "or save the tokenizer with a chat_template of yours"
        )
    if tokenizer.eos_token_id is None:
        raise UserError(f"--model {source.tokenizer}: its tokenizer names no eos_token to end an answer with")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(source: Source, config: TrainConfig, *, precision: str, deepspeed: bool, total_steps: int = 0) -> Any:
    """The model, ready to be prepared: weights in the right type, adapter in place.

    Args:
        precision: the launch's mixed precision, "no", "bf16" or "fp16".
        deepspeed: whether DeepSpeed keeps the float32 copy (then weights are loaded in `precision`).
        total_steps: optimizer steps to come; 0 to evaluate only: an adapter stays frozen, and none is started.
    Raises:
        UserError: it cannot be loaded, or the adapter's settings do not fit it.
    """
    from transformers import AutoModelForCausalLM

    if config.attn_implementation == "flex_attention" and total_steps and not device_count():
        raise UserError("--attn-implementation flex_attention: it has no backward on a CPU; leave it out, or use sdpa")
    if not (config.attn_implementation or config.trust_remote_code):
        _refuse_kernels(source.weights)
    with _errors_explained(source.weights):
        model = AutoModelForCausalLM.from_pretrained(
            source.weights,
            dtype=_dtype(config, precision, deepspeed, total_steps > 0),
            attn_implementation=config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
        )
    if source.adapter:
        with _errors_explained(source.adapter):
            model = saved_adapter(model, source.adapter, config, train=total_steps > 0)
    elif config.adapter != "none" and total_steps:
        torch.manual_seed(config.seed)  # the same new adapter on every rank and at every stage
        model = new_adapter(model, config, total_steps)
    if total_steps and config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if config.adapter != "none":
            model.enable_input_require_grads()
    return model


def _refuse_kernels(name: str) -> None:
    """Raises UserError if the model's configuration names code of a hub, as ORG/REPO, to compute attention with."""
    from transformers import PreTrainedConfig

    def named(value: Any, key: str = "") -> Iterator[str]:
        for inner, part in value.items() if isinstance(value, dict) else ():
            yield from named(part, key if key.endswith("_implementation") else inner)
        if isinstance(value, str) and key.endswith("_implementation") and "/" in value:
            yield value

    with _errors_explained(name):
        content, _ = PreTrainedConfig.get_config_dict(name)
    for kernel in named(content):
        raise UserError(
            f"--model {name}: its config.json has attention computed by code of a hub, {kernel}; choose "
            "--attn-implementation sdpa, or read that code, then pass --trust-remote-code"
        )


def compile_blocks(model: Any) -> None:
    """Have torch compile each of the model's repeated blocks, in place, on their first forwards.

    Raises:
        UserError: the model does not say which blocks it repeats.
    """
    names = set(getattr(model, "_no_split_modules", None) or [])
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError("--compile: the model does not name its repeated blocks (_no_split_modules); leave it out")
    for block in blocks:
        block.compile(dynamic=True)  # forwards differ in length


def compile_seconds() -> float:
    """Seconds that torch has spent compiling in this process."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent().get("total_wall_time", 0.0)


def _dtype(config: TrainConfig, precision: str, deepspeed: bool, train: bool) -> torch.dtype:
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    reduced = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    return reduced if deepspeed or config.adapter != "none" or not train else torch.float32


@contextlib.contextmanager
def _errors_explained(name: str) -> Iterator[None]:
    """Inside, what `name` is loaded from may fail as libraries fail: the error says what cannot be loaded, and why."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, pickle.UnpicklingError) as error:
        cause = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if isinstance(error, pickle.UnpicklingError):  # torch's own text suggests to run what is in the file
            cause = "its weights hold more than numbers, which could run code; use safetensors, from someone you trust"
        if "trust_remote_code" in str(error):
            cause = "it needs its own code to run; read that code, then pass --trust-remote-code"
        if "attn_implementation" in str(error):
            raise UserError(f"--attn-implementation: {cause}") from error
        where = "" if Path(name).exists() else "no such folder here, and as a hub id "
        raise UserError(f"--model {name}: {where}cannot be loaded: {cause}") from error


def trainable_parameters(model: torch.nn.Module) -> int:
    """Number of weights that learn (whole tensors, also where ZeRO-3 holds only a shard)."""
    return sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad)


def encoding_rules(tokenizer: Any, source: Source, config: TrainConfig) -> Rules:
    """The rules of tokenization besides the tokenizer: ids that end a turn, and what happens to long examples."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source.weights, trust_remote_code=config.trust_remote_code)
    except OSError:  # a model need not have one; the tokenizer's eos then stands alone
        generation = None
    return Rules(frozenset(end_of_turn_ids(tokenizer, generation)), config.max_length, config.truncation)
