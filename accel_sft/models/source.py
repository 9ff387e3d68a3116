"""Finds what `--model` and `--init-from` name: a folder, a hub id, an earlier run, or an adapter and its base."""

import contextlib
import dataclasses
import fnmatch
import hashlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError

from accel_sft.api.config import TrainConfig
from accel_sft.api.errors import UserError, first_line, what_and_where
from accel_sft.api.task import Task
from accel_sft.io.files import expanded, read_json
from accel_sft.io.run_dir import RunDir, absent_weights
from accel_sft.io.terminal import waiting
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.models.tiny import TINY_DEFAULTS

Settings = TypeVar("Settings", bound=TrainConfig)
_CARRY_ROWS = ("trainable_token_indices", "modules_to_save")
"""Keys of adapter_config.json. If one has a value, the adapter may hold embeddings of tokens that its base lacks."""
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/(\w+)/")
_NOT_READ = ["consolidated*", "*.gguf", "*.h5", "*.msgpack", "*.onnx*", "*.ot", "*.pt", "*.pth", "original/*"]
"""Files that are not downloaded for a hub id with a revision: weights in formats of other libraries."""
_SAMPLES, _SAMPLE_BYTES = 1 << 14, 1 << 12
_SHIPPED: tuple[str, ...] = ("*.safetensors", "*.safetensors.index.json", "README.md", "*.jinja", "config.json")
_SHIPPED += ("chat_template.json", "adapter_config.json", "generation_config.json", "tokenizer_config.json")
_SHIPPED += ("*processor_config.json", "tokenizer.json", "added_tokens.json", "special_tokens_map.json", "tekken.json")
_SHIPPED += ("vocab.*", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece*.model", "*.tiktoken")
_TEMPLATES = "additional_chat_templates"
"""The only subfolder that belongs to a model; transformers gives it this name."""


@dataclasses.dataclass(frozen=True)
class Source:
    """What to load: full weights, a tokenizer and, if there is one, an adapter. With `adds_tokens`, tokens that only
    the tokenizer has get embeddings, drawn with the seed `rows_seed` (None: the seed of the settings)."""

    weights: str
    tokenizer: str
    adapter: str | None = None
    adds_tokens: bool = False
    rows_seed: int | None = None


def find_source(model: str, *, init_from: str | None = None, revision: str | None = None) -> Source:
    """Return the source that `--init-from` names, or else `--model`: a folder of full weights, an adapter or a run; or
    a hub id, whose `revision` (branch, tag or commit) is downloaded to the hub's cache."""
    name = init_from or model
    folder = expanded(name)
    if revision and folder.exists():
        raise UserError(f"--revision {revision}: {name} is a folder; omit the option, or name a hub id")
    if (run := RunDir(folder)).record.is_file():
        if not run.final.is_dir():
            raise UserError(f"{name}: this run has no final/ yet; resume it first, or name its best/ folder")
        folder = run.final
    if (folder / "adapter_config.json").is_file():
        adapter = read_json(folder / "adapter_config.json")
        base = adapter.get("base_model_name_or_path") if isinstance(adapter, dict) else None
        if not isinstance(base, str) or not base:
            raise UserError(
                f"{folder}/adapter_config.json: base_model_name_or_path is missing; set it to the adapter's base"
            )
        beside = RunDir(folder.absolute().parent.resolve()).base
        if not Path(base).exists() and (beside / "config.json").is_file():  # the run's folder was moved
            base = str(beside)
        elif Path(base).is_absolute() and not Path(base).exists():
            raise UserError(f"{folder}: the adapter's base {base} is gone; restore it, or fix adapter_config.json")
        base = _fetched(base, adapter.get("revision"))
        return Source(base, str(folder), str(folder), any(adapter.get(key) for key in _CARRY_ROWS))
    if name and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserError(f"{name} is not a saved model: the folder has neither config.json nor adapter_config.json")
        return Source(str(folder.resolve()), str(folder))
    if init_from:
        raise UserError(f"--init-from {name}: no such run; give the folder of a finished run or of saved weights")
    if absent := absent_weights(name, "--model"):
        raise UserError(*absent)
    name = _fetched(name, revision)
    return Source(name, name)


def _fetched(name: str, revision: str | None) -> str:
    """Return the folder in the hub's cache with this revision of a hub id; `name` itself if there is no revision."""
    if not revision or Path(name).exists():
        return name
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache

    with errors_explained(name):
        # before 2.2, huggingface_hub asks for a commit's list of files even offline
        cached = constants.HF_HUB_OFFLINE and try_to_load_from_cache(name, "config.json", revision=revision)
        local = isinstance(cached, str)
        return str(snapshot_download(name, revision=revision, ignore_patterns=_NOT_READ, local_files_only=local))


def hub_place(name: str) -> tuple[str, str] | None:
    """Return hub id and commit of a model, given its hub id or its folder in the hub's cache; None if not cached."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    cached = None
    with contextlib.suppress(HFValidationError):  # raised for a folder that does not exist
        cached = None if Path(name).exists() else try_to_load_from_cache(name, "config.json")
    place = _SNAPSHOT.search(f"{cached}" if isinstance(cached, str) else f"{name}/")
    return (f"{place[1]}/{place[2]}", place[3]) if place else None


def began_with(source: Source, record: Mapping[str, Any] | None) -> str:
    """Return the folder or hub id that `--base auto` means. `record` is that of the weights' run, if there is one."""
    began = record["config"].get("init_from") or record["config"].get("model") if record else None
    if source.adapter:
        return source.weights
    if began == "tiny":
        return str(RunDir(Path(source.weights).parent).base)
    if isinstance(began, str):
        return began
    raise UserError(f"--base auto: {source.weights} is neither from a run nor an adapter; name its base")


def as_it_began(base: Source, tuned: Source, record: Mapping[str, Any] | None) -> Source:
    """Return `base`, with the tokenizer of the tuned weights if their run was given a `--chat-template`."""
    if not record or not record["config"].get("chat_template"):
        return base
    return dataclasses.replace(
        base, tokenizer=tuned.tokenizer, adds_tokens=True, rows_seed=record["config"].get("seed")
    )


def weights_identity(name: str) -> str | None:
    """Return the SHA-256 of the configuration and weight files of a folder; None for a hub id. Of a large file, only 64
    MiB spread evenly over it are hashed, which is enough because training changes every matrix."""
    folder = Path(name)
    if not folder.is_dir():
        return None
    with errors_explained(name):
        config = folder / "adapter_config.json"
        digest = hashlib.sha256((config if config.is_file() else folder / "config.json").read_bytes())
        for path in sorted((*folder.glob("*.safetensors"), *folder.glob("*.bin"))):
            size = path.stat().st_size
            digest.update(f"{path.name} {size}".encode())
            with path.open("rb", buffering=0) as file:
                for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
                    file.seek(start)
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def other_base(source: Source) -> list[str]:
    """Return a message (in a list) if the base's weights have changed since the adapter was trained; else []."""
    record = RunDir.record_around(source.adapter) if source.adapter else None
    before = record.get("base_weights") if record else None
    now = weights_identity(source.weights) if before else None
    if not now or now == before:
        return []
    return [f"{source.adapter}: its base {source.weights} has changed since training; restore the old weights"]


def is_tiny(model: str, *, init_from: str | None = None) -> bool:
    """Whether the model to train is the built-in `tiny`, new or trained by an earlier run."""
    seen = set()
    while isinstance(init_from, str) and init_from:
        run = RunDir(expanded(init_from, "--init-from"))
        if init_from in seen or not run.record.is_file():  # a record may name any run, even its own
            return False
        seen.add(init_from)
        earlier = run.read_record()["config"]
        model, init_from = earlier.get("model"), earlier.get("init_from")
    return model == "tiny"


def resolved(config: Settings, task: Task | type[Task]) -> Settings:
    """Return the settings with a default for each None; `tiny` has its own defaults, and the task's `tiny_steps`."""
    tiny = is_tiny(config.model, init_from=config.init_from)
    steps = {} if config.init_from else {"max_steps": task.tiny_steps}  # as many as random weights need
    return config.resolved({**TINY_DEFAULTS, **steps} if tiny else {})


def _reach(name: str) -> None:
    """Raise OSError if `name` is not cached and the hub cannot be reached; libraries would first retry for a minute."""
    from huggingface_hub import constants, file_download, get_session

    cached = Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=name, repo_type="model")
    if (cached / "snapshots").is_dir():
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # the HTTP library's error; huggingface_hub has used three libraries
        raise OSError(f"couldn't connect to '{constants.ENDPOINT}' ({first_line(error)})") from error


@contextlib.contextmanager
def errors_explained(name: str) -> Iterator[None]:
    """Turn libraries' errors in loading `name` into a UserError that says what cannot be loaded, and why."""
    here = Path(name).exists()
    try:
        with contextlib.nullcontext() if here else waiting(f"waiting for {name} from the hub"):
            if not here:
                _reach(name)
            yield
    except (UserError, MemoryError):
        raise
    except Exception as error:  # files may hold anything, and each library raises its own errors
        of_file = isinstance(error, RecursionError) or "PytorchStreamReader" in str(error)
        if isinstance(error, RuntimeError) and not of_file:
            raise  # out of memory, or a lost rank
        cause = first_line(error)
        if not isinstance(error, (OSError, ValueError, ImportError, UserWarning, SafetensorError)):
            cause = one_line(" ".join(what_and_where(error).split()), LONGEST_ERROR)
        if isinstance(error, pickle.UnpicklingError):  # torch's message suggests running the file's code
            cause = "its weights contain Python objects, which can run code; use safetensors from someone you trust"
        if "trust_remote_code" in str(error):
            cause = "it needs its own code to run; read that code, then pass --trust-remote-code"
        if "couldn't connect to" in cause:
            cause = f"{cause.rstrip('.')}; check the network, or name a folder that has the model's files"
        if any(word in str(error) for word in ("attn_implementation", "FlashAttention", "`kernels`")):
            raise UserError(f"--attn-implementation: {cause}") from error
        problem = "cannot be loaded" if here else "no such folder here, and the hub's model cannot be loaded"
        raise UserError(f"--model {name}: {problem}: {cause}") from error


def shipped_files(source: Path) -> tuple[list[Path], list[str]]:
    """Return the model's files, as paths relative to `source`, and the names of all other files and folders in it. A
    Python file belongs to the model if a configuration names it, or if a file so named imports it."""
    code = _own_code(source)
    shipped, left = [], []
    for path in sorted(source.iterdir()):
        if path.is_dir():
            templates = sorted(path.glob("*.jinja")) if path.name == _TEMPLATES else []
            shipped += [template.relative_to(source) for template in templates]
            left += [] if templates else [f"{path.name}/"]
        elif path in code or any(fnmatch.fnmatch(path.name, pattern) for pattern in _SHIPPED):
            shipped.append(Path(path.name))
        else:
            left.append(path.name)
    return shipped, left


def _own_code(source: Path) -> set[Path]:
    from transformers.dynamic_module_utils import get_relative_import_files

    files: set[Path] = set()
    for path in source.glob("*config.json"):
        content = read_json(path)
        named = json.dumps(content.get("auto_map") if isinstance(content, dict) else None)
        for module in re.findall(r'"(\w+)\.\w+"', named):  # "org/name--module.Class", code on the hub, does not match
            if not (file := source / f"{module}.py").is_file():
                continue
            try:
                files |= {file, *map(Path, get_relative_import_files(file))}
            except (OSError, ValueError) as error:
                raise UserError(f"{file}: the model's own code cannot be read ({error}); restore it") from None
    return files
