"""Makes a comparison's settings: one for each combination of the given values, with the command that starts it."""

import dataclasses
import hashlib
import itertools
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, Setting, flag_of
from accel_sft.launch.info import launch_of_yaml
from accel_sft.launch.launcher import PRECISION
from accel_sft.launch.machine_state import nvidia_gpus, this_machine_computes_bf16
from accel_sft.launch.parallelism import fitted, sized
from accel_sft.launch.precision import assume_precision
from accel_sft.launch.recordable import masked_words, recordable

SINGLE = "single"
"""The value of --launch that means one process without a launcher."""
OWN_COMMAS = frozenset(
    {"lora_modules_to_save", "lora_target_modules", "lora_target_parameters", "mix", "tracker", "train_only"}
)
"""Trainer options whose values may contain commas, so they are not split at commas."""


@dataclasses.dataclass(frozen=True)
class ComparedSetting:
    """One combination of values, and how it is launched.

    Attributes:
        values: maps the given options, the launcher's included, to values; secrets are left out.
        launch: `processes` and `precision`, as the launch file and the launcher's flags set them.
        launcher, words: the command's words before `-m accel_sft` and after it.
        environment: environment variables that the launch gets in addition to the user's own.
        fingerprint: SHA-256 of the launch file and of the DeepSpeed JSON that it names; "" without a launch file.
    """

    name: str
    folder: str
    values: Mapping[str, Any]
    launch: Mapping[str, Any]
    launcher: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    fingerprint: str

    def command(self, run_folder: Path) -> list[str]:
        """The command that is started, with `run_folder` as its --output-dir."""
        return [*self.launcher, "-m", "accel_sft", *self.words, "--output-dir", str(run_folder)]

    def shown_command(self, run_folder: Path) -> str:
        """The command as a person would type it, without secrets."""
        words = self.command(run_folder)
        module = "accelerate.commands.launch"
        typed = ["accelerate", "launch", *words[words.index(module) + 1 :]] if module in words else words
        before = [f"{name}={value} " for name, value in self.environment.items()]
        typed = ["python" if word == sys.executable else word for word in masked_words(typed)]
        return "".join(before) + shlex.join(typed)


def split_values(setting: Setting, texts: Sequence[str], *, unsplit: bool = False) -> list[str]:
    """Return the values in the texts given to an option, split at commas; equal values (1e-4, 0.0001) count once. With
    `unsplit` each text is one value, which may contain commas."""
    parts = [part.strip() for text in texts for part in ([text] if unsplit else text.split(","))]
    if "" in parts and not unsplit:
        raise UserError(f"{setting.flag} {','.join(texts)}: a value between two commas is empty; remove a comma")
    if problems := [line for part in parts if (line := setting.problem(setting.read(part)))]:
        raise UserError(*problems)
    unique: dict[Any, str] = {}
    for part in parts:
        unique.setdefault(setting.read(part), part)
    return list(unique.values())


def product(
    task: str,
    launches: Mapping[str, Path | None],
    processes: Sequence[str],
    precisions: Sequence[str],
    options: Mapping[Setting, Sequence[str]],
    run_words: Sequence[str],
) -> tuple[list[ComparedSetting], list[str]]:
    """Return every combination of values, the last option changing fastest, and the names of the options that vary.
    `launches` maps names given with --launch to files, and `SINGLE` to None: for it, --num-processes is ignored."""
    given = {"num_processes": processes, "mixed_precision": precisions}
    given |= {option.name: values for option, values in options.items()}
    axes = {"launch": [*launches], **{name: values for name, values in given.items() if values}}
    varied = [name for name, values in axes.items() if len(values) > 1]
    for option, values in options.items():
        if len(values) > 1 and any(HIDDEN in masked_words([option.flag, value]) for value in values):
            raise UserError(f"{option.flag}: secrets are not recorded, so they cannot be compared; give one value")
    by_name = {option.name: option for option in options}
    settings: dict[str, ComparedSetting] = {}
    for number, combination in enumerate(itertools.product(*axes.values()), 1):
        chosen = dict(zip(axes, combination, strict=True))
        if chosen["launch"] == SINGLE:
            chosen.pop("num_processes", None)
        name = _name(chosen, varied)
        if name in settings:
            continue
        words = [word for key, value in chosen.items() if key in by_name for word in _words(by_name[key], value)]
        values_read = {key: by_name[key].read(value) if key in by_name else value for key, value in chosen.items()}
        settings[name] = ComparedSetting(
            name=name,
            folder=f"{number:02}-{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:60].strip('-')}",
            values={key: recordable(value, key) for key, value in values_read.items()},
            words=(task, *words, *run_words),
            **_launch(launches[chosen["launch"]], chosen),
        )
    return [*settings.values()], varied


def _name(chosen: Mapping[str, str], varied: Sequence[str]) -> str:
    parts = [chosen["launch"]] if "launch" in varied or not varied else []
    parts += [f"{flag_of(key)[2:]} {chosen[key]}" for key in varied if key != "launch" and key in chosen]
    return ", ".join(parts)


def _words(option: Setting, value: str) -> list[str]:
    if option.type is bool:
        return [option.flag if option.read(value) else f"--no-{option.flag[2:]}"]
    return [option.flag, value]


def _launch(file: Path | None, chosen: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields of `ComparedSetting` that say how it is launched; `file` is None for `SINGLE`."""
    if file is None:
        precision = chosen.get("mixed_precision")
        facts: dict[str, Any] = {"processes": 1, "precision": precision or "no"}
        environment = {PRECISION: precision} if precision else {}
        return {"launch": facts, "launcher": (sys.executable,), "environment": environment, "fingerprint": ""}
    of_launcher = ("num_processes", "mixed_precision")
    flags = [word for key in of_launcher if key in chosen for word in (f"--{key}", chosen[key])]
    launch = fitted(launch_of_yaml(file, *flags), len(nvidia_gpus()[1]))
    launch = assume_precision(launch, this_machine_computes_bf16())
    flags += sized(launch, launch.world_size)[2:]  # under tensor parallelism all processes share each matrix
    if launch.machines > 1:
        problem = f"it is for {launch.machines} machines; compare starts launches on this machine only"
        raise UserError(f"--launch {chosen['launch']}: {problem}")
    facts = {"processes": launch.world_size, "precision": launch.precision[0]}
    # port 0 means any free port: if another launch used the fixed port, this launch would fail late
    words = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0", *flags]
    content = launch.text + repr(launch.json)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {"launch": facts, "launcher": (sys.executable, *words), "environment": {}, "fingerprint": digest}
