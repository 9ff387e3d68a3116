"""Reads the launch from the launcher's flags, yaml and environment.

`accelerate launch` hands its yaml over through environment variables and drops unknown keys in silence. So the yaml
itself is read again, its path taken from the command line of the launcher (this process's parent).
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.io.files import read_text
from accel_sft.io.text import one_line
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION, launcher_command, launcher_environment
from accel_sft.launch.rank_environment import launcher_flags, rank_environment

_MOST_VALUES = 10_000
"""Maximum number of values in a launch file: with aliases (`*a`) a short file can make very many, or endlessly many."""
_JSON_SECTIONS = ("zero_optimization", "bf16", "fp16", "tensor_parallel")
_OFFLOADS = ("offload_optimizer", "offload_param")
"""Keys of DeepSpeed's JSON, and of its zero_optimization, whose values are objects."""


def launch_of_yaml(path: str | Path, *flags: str) -> Launch:
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
    config_file = arguments.get("config_file")
    if config_file is None and command:
        config_file = _default_config_file(environment)
    text, content = ("", {}) if config_file is None else _read_yaml(folder / config_file)
    json_file, loaded = None, {}
    named = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    if named and environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true":
        json_file = Path(named)
        beside = Path(config_file or "").parent / named
        try:
            if not (folder / json_file).exists() and (folder / beside).is_file():
                json_file = beside  # so the shipped pair is found from every folder
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
