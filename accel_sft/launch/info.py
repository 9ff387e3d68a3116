"""`Launch`: backend, ZeRO stage, offload, precision and ranks, read from the launcher's flags, yaml and environment.

`accelerate launch` hands its yaml over through environment variables and drops unknown keys in silence. So the yaml
itself is read again, its path taken from the command line of the launcher (this process's parent).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import read_text
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import PRECISION, launcher_command, launcher_environment
from accel_sft.launch.rank_environment import DIMENSIONS, launcher_flags, rank_environment

PARENT = os.getppid()
"""Process id of the parent. Read before torch is imported, which takes seconds: a launcher that is killed meanwhile
would otherwise go unnoticed."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of the audit, with its remedy. An `error` stops the run, a `warning` or a `note` is printed."""

    level: str
    what: str
    mend: str

    def __str__(self) -> str:
        text = f"{self.what}: {self.mend}"
        return one_line(text, len(text))  # a key of a file may hold a line break


_MOST_VALUES = 10_000
"""Most values that a launch file may have: an alias (`*a`) can repeat a value that repeats others, or itself."""
_JSON_SECTIONS = ("zero_optimization", "bf16", "fp16", "tensor_parallel")
_OFFLOADS = ("offload_optimizer", "offload_param")
"""Keys of DeepSpeed's JSON, and of its zero_optimization, whose values are objects."""
LEVELS = ("error", "warning", "note")
error, warning, note = (functools.partial(Finding, level) for level in LEVELS)


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch as this rank sees it: what the user asked for (flags, yaml, JSON) and what arrived (environment).

    Attributes:
        arguments: the launcher's own flags by name without dashes, `num_processes`; empty when there is no launcher.
        config_file, text, yaml: the `--config_file`, its text and its content.
        json_file, json: the DeepSpeed JSON the yaml names, and its content; None and {} without one.
        environment: the variables that `accelerate launch` sets for a rank.
        variable: `ACCELERATE_MIXED_PRECISION` as the user set it, which the launcher overwrites for ranks; "" if unset.
        resolved: precision and the reason for it, chosen for a launch that names none (launch/precision.py).
    """

    arguments: Mapping[str, str]
    config_file: Path | None
    text: str
    yaml: Mapping[str, Any]
    json_file: Path | None
    json: Mapping[str, Any]
    environment: Mapping[str, str]
    variable: str = ""
    resolved: tuple[str, str] | None = None

    @classmethod
    def from_yaml(cls, path: str | Path, *flags: str) -> Launch:
        """The launch that `accelerate launch --config_file PATH FLAGS` would start here, as its first rank reads it.

        Nothing is started, and neither accelerate nor torch is imported.

        Args:
            flags: the launcher's own, as on its command line: "--num_processes", "4".
        Raises:
            UserError: the file or a DeepSpeed JSON that it names cannot be read, or the launcher would refuse it.
        """
        command = ["accelerate", "launch", "--config_file", str(path), *flags]
        handed_over = rank_environment(_read_yaml(Path(path))[1], launcher_flags(command), str(path))
        return read_launch({**os.environ, **handed_over}, command, os.environ)

    @property
    def world_size(self) -> int:
        return int(self.environment.get("WORLD_SIZE", 1))

    @property
    def local_world_size(self) -> int:
        return int(self.environment.get("LOCAL_WORLD_SIZE", self.world_size))

    @property
    def machines(self) -> int:
        return max(1, self.world_size // self.local_world_size)

    @property
    def backend(self) -> str:
        """`deepspeed`, `fsdp`, `megatron`, `ddp` or `plain`: which library runs the ranks."""
        for name in ("deepspeed", "fsdp", "megatron_lm"):
            if self.environment.get(f"ACCELERATE_USE_{name.upper()}", "").lower() == "true":
                return name.removesuffix("_lm")
        return "ddp" if self.world_size > 1 else "plain"

    @property
    def zero(self) -> Mapping[str, Any]:
        """The JSON's `zero_optimization`, {} in the yaml form."""
        return self.json.get("zero_optimization") or {}

    @property
    def stage(self) -> int:
        """The ZeRO stage, 0 without DeepSpeed."""
        if self.backend != "deepspeed":
            return 0
        stage = self.zero.get("stage", 0) if self.json_file else self._deepspeed_variable("ZERO_STAGE", "2")
        if not str(stage).isdecimal():
            raise UserError(f"{self.json_file or self.config_file}: ZeRO stage {one_line(str(stage))}: 0, 1, 2 or 3")
        return int(stage)

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds the whole model: under ZeRO-3 and FSDP a forward gathers each layer's weights."""
        return self.backend == "fsdp" or self.stage == 3

    def offload(self, what: str) -> str:
        """Where `optimizer` or `param` is offloaded to: none, cpu or nvme. FSDP offloads both or neither."""
        if self.backend == "fsdp":
            return "cpu" if self.environment.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true" else "none"
        if self.backend != "deepspeed":
            return "none"
        if self.json_file:
            return str((self.zero.get(f"offload_{what}") or {}).get("device", "none"))
        return self._deepspeed_variable(f"OFFLOAD_{what.upper()}_DEVICE", "none")

    def nvme_path(self, what: str) -> Path:
        """The folder for `optimizer` or `param` under NVMe offload. The launcher reads this key and does not
        hand it over (accelerate 1.15), so it is taken from the command line or the yaml."""
        key = f"offload_{what}_nvme_path"
        inside = (self.zero.get(f"offload_{what}") or {}).get("nvme_path")
        named = self.arguments.get(key) or (self.yaml.get("deepspeed_config") or {}).get(key) or inside
        return Path(str(named or "nvme_offload"))

    @property
    def parallelism(self) -> dict[str, int]:
        """Sizes in ranks of the dimensions of Accelerate's `ParallelismConfig`; {} if the launch names none.

        Raises:
            UserError: a variable set by hand is no number.
        """
        if self.environment.get("ACCELERATE_USE_PARALLELISM_CONFIG", "").lower() != "true":
            return {}
        sizes = {}
        for name in DIMENSIONS:
            value = self.environment.get(variable := f"PARALLELISM_CONFIG_{name.upper()}_SIZE", "1")
            if not value.isdecimal() or int(value) < 1:
                raise UserError(f"{variable} is {value!r}: expected a number of ranks, at least 1")
            sizes[name] = int(value)
        return sizes

    @property
    def shard_ranks(self) -> int:
        """Number of ranks that one copy of the model is sharded over, if it is sharded; fewer than all under HSDP."""
        copies = self.parallelism.get("dp_replicate", 1) if self.backend == "fsdp" else 1
        return max(self.world_size // copies, 1)

    @property
    def sequence_ranks(self) -> int:
        """Ranks that share the tokens of each row; 1 without sequence parallelism."""
        return self.parallelism.get("sp", 1) if self.backend == "deepspeed" else 1

    @property
    def gathers_16bit_weights(self) -> bool:
        if self.json_file:
            return self.zero.get("stage3_gather_16bit_weights_on_model_save") is True
        return self._deepspeed_variable("ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"

    def json_enabled(self, precision: str) -> str:
        """`true`, `false`, `auto` or `none`: what the JSON says of `bf16` or `fp16`."""
        return str((self.json.get(precision) or {}).get("enabled")).lower()

    @property
    def precision(self) -> tuple[str, str]:
        """The precision (`bf16`, `fp16`, `fp8` or `no`), and what decided it."""
        if named := self.named_precision:
            return named[0], f"from {named[1]}"
        return self.resolved or ("no", "the default")

    @property
    def named_precision(self) -> tuple[str, str] | None:
        """The precision (`bf16`, `fp16`, `fp8` or `no`), and where it is named; None if the launch names none.

        A JSON with true or false wins over the command line. The `no` that the launcher gives a rank if nothing was
        named does not count.
        """
        for name in ("bf16", "fp16"):
            if self.json_enabled(name) == "true":
                return name, f"{self.json_file}"
        asked = self.asked_precision
        wanted = asked[0] if asked else "bf16"
        if wanted in ("bf16", "fp16") and self.json_enabled(wanted) == "false":  # DeepSpeed knows no other key
            return "no", f"{self.json_file}"
        return asked

    @property
    def asked_precision(self) -> tuple[str, str] | None:
        """The precision that the command line, the yaml or the user's variable names, and which; None if none does."""
        value = self.environment.get(PRECISION, "no").lower()
        if "mixed_precision" in self.arguments:
            return value, "--mixed_precision"
        if self.yaml.get("mixed_precision") is not None:
            return value, f"{self.config_file}"
        if self.variable:
            return self.variable.lower(), PRECISION
        return (value, "the launcher") if value != "no" else None

    def _deepspeed_variable(self, name: str, default: str) -> str:
        return self.environment.get(f"ACCELERATE_DEEPSPEED_{name}", default)


def read_launch(
    environment: Mapping[str, str] | None = None,
    command: list[str] | None = None,
    launchers: Mapping[str, str] | None = None,
) -> Launch:
    """Read the launch this process is a rank of.

    Args:
        environment: the variables of this process; by default `os.environ`.
        command: the command line of a launcher started in this folder; by default that of the nearest one above this
            process.
        launchers: the environment of that launcher; by default that of the nearest one above, or {} with a `command`.
    Raises:
        UserError: the yaml, or the DeepSpeed JSON that it names, cannot be read.
    """
    environment = os.environ if environment is None else environment
    if command is None:
        command, folder = launcher_command()
        launchers = launcher_environment() if command else environment
    else:
        folder, launchers = Path(), (launchers or {}) if command else environment
    arguments = launcher_flags(command)
    config_file, text, content = arguments.get("config_file"), "", {}
    if config_file is None and command:
        config_file = _default_config_file(environment)
    if config_file is not None:
        text, content = _read_yaml(folder / config_file)
    json_file, loaded = None, {}
    named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        json_file = Path(named)
        try:
            loaded = json.loads(read_text(folder / json_file))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"deepspeed_config_file {one_line(named)}: cannot be read as JSON: {error}") from None
        _check_sections(f"deepspeed_config_file {named}", loaded, _JSON_SECTIONS)
        _check_sections(f"deepspeed_config_file {named}", loaded.get("zero_optimization") or {}, _OFFLOADS)
    path = None if config_file is None else Path(config_file)
    variable = launchers.get(PRECISION, "")
    return Launch(arguments, path, text, content, json_file, loaded, dict(environment), variable)


def _read_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """Text and content of a launch file."""
    import yaml

    try:
        text = read_text(path)
        content = yaml.safe_load(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        problem = one_line(" ".join(str(error).split()), 300)
        raise UserError(f"launch file {path}: cannot be read as YAML: {problem}") from None
    content = content or {}
    todo, values = [content], 0
    while todo and (values := values + 1) <= _MOST_VALUES:
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if todo:
        raise UserError(f"launch file {path}: its aliases make more than {_MOST_VALUES:,} values; write them out")
    if not isinstance(content, dict):
        raise UserError(f"launch file {path}: write one `key: value` a line")
    _check_sections(f"launch file {path}", content, [key for key in content if str(key).endswith("_config")])
    return text, content


def _check_sections(where: str, content: Any, names: Iterable[str]) -> None:
    """Raise UserError unless `content` is a mapping, and its values under these names are mappings or absent."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected keys with values")
    for name in names:
        if not isinstance(content.get(name) or {}, dict):
            raise UserError(f"{where}: {one_line(name)}: expected keys with values")


def _default_config_file(environment: Mapping[str, str]) -> str | None:
    """The file that `accelerate config` writes, used by a launch that names none."""
    cache = environment.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environment.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    path = home / "accelerate" / "default_config.yaml"
    return str(path) if path.is_file() else None


def device_count() -> int:
    """Accelerators that ranks can be spread over (0 on a CPU-only machine, and for Apple's, which joins no group)."""
    import torch

    if not torch.accelerator.is_available() or torch.accelerator.current_accelerator().type == "mps":
        return 0
    return torch.accelerator.device_count()
