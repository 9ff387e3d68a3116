"""`Launch`: backend, ZeRO stage, offload, precision and ranks, read from flags, launch file and environment.

`accelerate launch` passes its yaml on as environment variables, and silently drops unknown keys. So the yaml is read
again; its path is in the command line of the launcher (this process's parent). No torch at import.
"""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import accel_sft
from accel_sft.api.errors import UserError
from accel_sft.io.files import read_text
from accel_sft.io.text import one_line
from accel_sft.launch.launcher import PRECISION, launcher_command, launcher_flags

FOLDER = Path(accel_sft.__file__).parent / "launch_files"
"""The launch files that come with the package; in a checkout a link to accelerate_configs/."""
DIMENSIONS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
"""Dimensions of Accelerate's ParallelismConfig; each has a size in ranks."""
_MOST_VALUES = 10_000
"""Maximum number of values in a launch file: with aliases (`*a`) a short file can make very many, or endlessly many."""
_JSON_SECTIONS = ("zero_optimization", "bf16", "fp16", "data_types")
_OFFLOADS = ("offload_optimizer", "offload_param")
"""Keys of DeepSpeed's JSON, and of its zero_optimization, whose values are objects."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launch as this rank sees it: what the user asked for (flags, yaml, JSON) and what arrived (environment)."""

    arguments: Mapping[str, str]  # the launcher's own flags by name without dashes; empty without a launcher
    config_file: Path | None
    text: str  # content of the launch file
    yaml: Mapping[str, Any]
    json_file: Path | None  # DeepSpeed's JSON, which the yaml names
    json: Mapping[str, Any]  # content of the JSON; {} without one
    environment: Mapping[str, str]  # this rank's variables, among them those that `accelerate launch` sets
    users_precision_variable: str = ""  # the user's value; "" under `accelerate launch`, which overwrites it
    resolved: tuple[str, str] | None = None  # the precision chosen for a launch that names none, and why

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
            raise UserError(
                f"{self.json_file or self.config_file}: ZeRO stage {one_line(str(stage))} must be 0, 1, 2 or 3"
            )
        return int(stage)

    @property
    def shards_weights(self) -> bool:
        """Whether no rank holds the whole model."""
        return self.backend == "fsdp" or self.stage == 3 or self.tensor_ranks > 1

    @property
    def sums_in_float32(self) -> bool:
        """Whether DeepSpeed accumulates a step's bf16 gradients in float32, as stages 2 and 3 can."""
        named = (self.json.get("data_types") or {}).get("grad_accum_dtype") or "fp32"
        # stage 2 with an offloaded optimizer would accumulate on the GPU, in the memory that offload should free
        able = self.stage == 3 or (self.stage == 2 and self.offload("optimizer") == "none")
        return self.precision[0] == "bf16" and able and named == "fp32"

    def offload(self, what: str) -> str:
        """Where `optimizer` or `param` is offloaded to: none, cpu or nvme. FSDP offloads both or neither."""
        if self.backend == "fsdp":
            return "cpu" if self.environment.get("FSDP_OFFLOAD_PARAMS", "").lower() == "true" else "none"
        if self.backend != "deepspeed":
            return "none"
        if self.json_file:
            return str((self.zero.get(f"offload_{what}") or {}).get("device", "none"))
        return self._deepspeed_variable(f"OFFLOAD_{what.upper()}_DEVICE", "none")

    @property
    def offload_ratio(self) -> float:
        """Share of sub-groups with offloaded optimizer states in DeepSpeed's Twin-Flow, else 1; NaN if invalid."""
        ratio = (self.zero.get("offload_optimizer") or {}).get("ratio", 1.0) if self.backend == "deepspeed" else 1.0
        try:
            return float(ratio)
        except (TypeError, ValueError):
            return math.nan

    def nvme_path(self, what: str) -> Path:
        """The folder for `optimizer` or `param` under NVMe offload; ranks do not get it from accelerate 1.15."""
        key = f"offload_{what}_nvme_path"
        inside = (self.zero.get(f"offload_{what}") or {}).get("nvme_path")
        named = self.arguments.get(key) or (self.yaml.get("deepspeed_config") or {}).get(key) or inside
        return Path(str(named or "nvme_offload"))

    @property
    def parallelism(self) -> dict[str, int]:
        """The size, in ranks, of each dimension of Accelerate's `ParallelismConfig`; {} if none is named."""
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
        """Number of ranks that share a copy of the model if it is sharded; under HSDP, fewer than all ranks."""
        copies = self.parallelism.get("dp_replicate", 1) if self.backend == "fsdp" else 1
        return max(self.world_size // copies, 1)

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share the tokens of each row; 1 without sequence parallelism."""
        return self.parallelism.get("sp", 1) if self.backend == "deepspeed" else 1

    @property
    def tensor_ranks(self) -> int:
        """Number of ranks that share each matrix and compute the same rows; 1 without tensor parallelism."""
        return self.parallelism.get("tp", 1) if self.backend == "ddp" else 1

    @property
    def gathers_16bit_weights(self) -> bool:
        if self.json_file:
            return self.zero.get("stage3_gather_16bit_weights_on_model_save") is True
        return self._deepspeed_variable("ZERO3_SAVE_16BIT_MODEL", "false").lower() == "true"

    def json_enabled(self, precision: str) -> str:
        """The value of `enabled` in the JSON's section `bf16` or `fp16`: `true`, `false`, `auto` or `none`."""
        return str((self.json.get(precision) or {}).get("enabled")).lower()

    @property
    def precision(self) -> tuple[str, str]:
        """The precision (`bf16`, `fp16`, `fp8` or `no`), and what decided it."""
        if named := self.named_precision:
            return named[0], f"from {named[1]}"
        return self.resolved or ("no", "the default")

    @property
    def named_precision(self) -> tuple[str, str] | None:
        """The precision, and where it is named; None if the launch names none. The `no` that the launcher sets by
        default does not count. `enabled` true or false in the JSON wins over the command line."""
        for name in ("bf16", "fp16"):
            if self.json_enabled(name) == "true":
                return name, f"{self.json_file}"
        requested = self.requested_precision
        wanted = requested[0] if requested else "bf16"
        if wanted in ("bf16", "fp16") and self.json_enabled(wanted) == "false":  # DeepSpeed has no key for fp8
            return "no", f"{self.json_file}"
        return requested

    @property
    def requested_precision(self) -> tuple[str, str] | None:
        """The precision in the command line, the yaml or a variable, and where it is named; None if it is not named."""
        value = self.environment.get(PRECISION, "no").lower()
        if "mixed_precision" in self.arguments:
            return value, "--mixed_precision"
        if self.yaml.get("mixed_precision") is not None:
            return value, f"{self.config_file}"
        if self.users_precision_variable:
            return self.users_precision_variable.lower(), PRECISION
        return (value, "the launcher") if value != "no" else None

    def _deepspeed_variable(self, name: str, default: str) -> str:
        return self.environment.get(f"ACCELERATE_DEEPSPEED_{name}", default)


def shipped() -> dict[str, Path]:
    """Every launch file of FOLDER, by its name without .yaml, in alphabetical order."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def launch_of_yaml(path: str | Path, *flags: str) -> Launch:
    """The launch that `accelerate launch --config_file PATH FLAGS` would start here, read from the environment that its
    first rank would get. Raises UserError if the launcher would refuse the file. Calls accelerate's own functions,
    which import torch."""
    if _read_yaml(Path(path))[1].get("mixed_precision") is False:
        raise UserError(f"launch file {path}: mixed_precision: write 'no' in quotes: YAML reads a bare no as false")
    command = ["accelerate", "launch", "--config_file", str(path), *flags]
    return read_launch(_handed_over(Path(path), command), command)


def launch_of_this_process() -> Launch:
    """The launch that this process belongs to; without a launcher, a launch of one process."""
    return read_launch(os.environ, *launcher_command())


def read_launch(environment: Mapping[str, str], command: list[str], folder: Path = Path()) -> Launch:
    """The launch of a rank with these environment variables. `command` started the rank's launcher, in the folder
    `folder`. Without a launcher the command is empty."""
    arguments = launcher_flags(command)
    config_file = arguments.get("config_file")
    if config_file is None and command:
        from accelerate.commands.config.config_args import default_config_file

        config_file = default_config_file if Path(default_config_file).is_file() else None
    text, content = ("", {}) if config_file is None else _read_yaml(folder / config_file)
    json_file, loaded = None, {}
    named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        json_file = Path(named)
        beside = Path(config_file or "").parent / named
        try:
            if not (folder / json_file).exists() and (folder / beside).is_file():
                json_file = beside  # so a yaml beside its JSON works from every folder
            loaded = json.loads(read_text(folder / json_file))
        except (OSError, ValueError, RecursionError) as error:
            raise UserError(f"deepspeed_config_file {one_line(named)}: cannot be read as JSON: {error}") from None
        _check_sections(f"deepspeed_config_file {named}", loaded, _JSON_SECTIONS)
        _check_sections(f"deepspeed_config_file {named}", loaded.get("zero_optimization") or {}, _OFFLOADS)
    path = None if config_file is None else Path(config_file)
    variable = "" if command else environment.get(PRECISION, "")
    return Launch(arguments, path, text, content, json_file, loaded, dict(environment), variable)


@functools.cache
def launcher_parser() -> argparse.ArgumentParser:
    """The parser of `accelerate launch`; it imports torch."""
    from accelerate.commands.launch import launch_command_parser

    parser: argparse.ArgumentParser = launch_command_parser()
    return parser


def _handed_over(path: Path, command: list[str]) -> dict[str, str]:
    """The environment that the `accelerate launch` in `command` would give to the first rank of a machine."""
    usage = io.StringIO()
    try:
        from accelerate.commands.launch import _validate_launch_command
        from accelerate.utils import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

        with contextlib.redirect_stderr(usage):
            args = launcher_parser().parse_args([*command[2:], "train.py"])
            precision, args.mixed_precision = args.mixed_precision, None  # the launcher would check it on a GPU
            args, *_ = _validate_launch_command(args)
            args.mixed_precision = precision or args.mixed_precision
            args.main_process_port = 0  # any free port, because nothing is started
            args.deepspeed_fields_from_accelerate_config = ""
            processes, machines, machine = int(args.num_processes), int(args.num_machines), int(args.machine_rank or 0)
            if not 1 <= machines <= processes:
                raise ValueError(
                    f"num_processes {processes} on {machines} machines: give at least one process for each"
                )
            local = processes // machines
            ranks = {"WORLD_SIZE": f"{local * machines}", "LOCAL_WORLD_SIZE": f"{local}", "LOCAL_RANK": "0"}
            ranks["RANK"] = f"{local * machine if machines > 1 else 0}"
            if args.cpu or not (args.use_deepspeed or args.use_fsdp or args.use_megatron_lm or args.multi_gpu):
                ranks, environment = {}, prepare_simple_launcher_cmd_env(args)[1]
            elif args.use_deepspeed:
                environment = prepare_deepspeed_cmd_env(args)[1]
            else:
                environment = prepare_multi_gpu_env(args)
            return {**environment, **ranks}
    except (Exception, SystemExit) as error:
        last = usage.getvalue().splitlines()[-1:]
        reason = "".join(last) if isinstance(error, SystemExit) else f"{type(error).__name__}: {error}"
        shown = one_line(" ".join(reason.split()), 300)
        raise UserError(f"launch file {path}: accelerate launch would refuse it: {shown}") from error


def _read_yaml(path: Path) -> tuple[str, dict[str, Any]]:
    """A launch file's text, and the mapping parsed from it."""
    import yaml

    try:
        text = read_text(path)
        content = yaml.safe_load(text)
    # for content such as `!!bool x` or `!!timestamp x`, yaml raises errors of Python, not its own
    except (OSError, ValueError, LookupError, AttributeError, RecursionError, yaml.YAMLError) as error:
        problem = one_line(" ".join(str(error).split()), 300)
        raise UserError(f"launch file {path}: cannot be read as YAML: {problem}") from None
    content = content or {}
    todo, values = [content], 0
    while todo and (values := values + 1) <= _MOST_VALUES:
        value = todo.pop()
        todo += value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    if todo:
        raise UserError(f"launch file {path}: its aliases make more than {_MOST_VALUES:,} values; write the values out")
    if not isinstance(content, dict):
        raise UserError(f"launch file {path}: write one `key: value` per line")
    _check_sections(f"launch file {path}", content, [key for key in content if str(key).endswith("_config")])
    return text, content


def _check_sections(where: str, content: Any, names: Iterable[str]) -> None:
    """Raise UserError unless `content` is a mapping in which each of these names is absent or has a mapping."""
    if not isinstance(content, dict):
        raise UserError(f"{where}: expected keys with values")
    for name in names:
        if not isinstance(content.get(name) or {}, dict):
            raise UserError(f"{where}: {one_line(name)}: expected keys with values")
