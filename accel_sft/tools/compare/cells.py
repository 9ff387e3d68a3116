"""The cells of a comparison: the product of all values that are given, each with its launch and its run's words."""

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
from accel_sft.api.options import Setting
from accel_sft.launch.info import Launch
from accel_sft.launch.launcher import PRECISION
from accel_sft.launch.precision import expected, this_machine_computes_bf16
from accel_sft.launch.recordable import masked_words, recordable

SINGLE = "single"
"""The value of --launch that stands for one process without a launcher."""
PRECISIONS = ("no", "fp16", "bf16")
OWN_COMMAS = frozenset({"lora_target_modules", "tracker"})
"""Trainer options whose values hold commas themselves."""
_LAUNCHER = ("launch", "num_processes", "mixed_precision")


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination of values.

    Attributes:
        name: of what is varied, as shown to the user; `folder` is made of it.
        settings: every value that is given, by name, the launcher's among them; secrets are left out.
        launch: backend, zero_stage, offload, processes and precision, as far as the launch file tells.
        launcher: the words in front of `-m accel_sft`.
        words: the words behind it: the task, and its run's options.
        environment: variables that its launch gets besides the user's own.
        fingerprint: of the launch file's content and of the DeepSpeed JSON that it names.
    """

    name: str
    folder: str
    settings: Mapping[str, Any]
    launch: Mapping[str, Any]
    launcher: tuple[str, ...]
    words: tuple[str, ...]
    environment: Mapping[str, str]
    fingerprint: str

    def command(self, run_folder: Path) -> list[str]:
        """What is started; the run's own options, which are the comparison's defaults, stand before the user's."""
        return [*self.launcher, "-m", "accel_sft", *self.words, "--output-dir", str(run_folder)]

    def shown_command(self, run_folder: Path) -> str:
        """The command as a person would type it, without secrets."""
        words = self.command(run_folder)
        module = "accelerate.commands.launch"
        typed = ["accelerate", "launch", *words[words.index(module) + 1 :]] if module in words else words
        before = [f"{name}={value} " for name, value in self.environment.items()]
        typed = ["python" if word == sys.executable else word for word in masked_words(typed)]
        return "".join(before) + shlex.join(typed)


def values(setting: Setting, texts: Sequence[str], *, whole: bool = False) -> list[str]:
    """The values that an option was given, by commas and by repetition, each once (1e-4 is 0.0001).

    Args:
        whole: its values hold commas themselves.
    Raises:
        UserError: an empty value, or one that is no value of the setting.
    """
    found = [part.strip() for text in texts for part in ([text] if whole else text.split(","))]
    if "" in found and not whole:
        raise UserError(f"{setting.flag} {','.join(texts)}: a value between two commas is empty; remove a comma")
    if wrong := [line for part in found if (line := setting.problem(setting.read(part)))]:
        raise UserError(*wrong)
    unique: dict[Any, str] = {}
    for part in found:
        unique.setdefault(setting.read(part), part)
    return list(unique.values())


def product(
    task: str,
    launches: Mapping[str, Path | None],
    processes: Sequence[str],
    precisions: Sequence[str],
    options: Mapping[Setting, Sequence[str]],
    run_words: Sequence[str],
) -> tuple[list[Cell], list[str]]:
    """Every combination as a cell, in the order of the values, the last option's changing fastest; and what is varied.

    Args:
        launches: launch files by the name they were given with; None for `SINGLE`, which --num-processes does not
            concern.
        run_words: given to every run as they are, behind the values of `options`.
    Raises:
        UserError: a launch file cannot be read, is of several machines, or the launcher would refuse it.
    """
    axes: dict[str, Sequence[str]] = {"launch": [*launches]}
    axes |= {name: found for name, found in (("num_processes", processes), ("mixed_precision", precisions)) if found}
    axes |= {setting.name: found for setting, found in options.items()}
    varied = [name for name, found in axes.items() if len(found) > 1]
    by_name = {setting.name: setting for setting in options}
    cells: dict[str, Cell] = {}
    for number, combination in enumerate(itertools.product(*axes.values()), 1):
        chosen = dict(zip(axes, combination, strict=True))
        if chosen["launch"] == SINGLE:
            chosen.pop("num_processes", None)
        name = _name(chosen, varied)
        if name in cells:
            continue
        given = [word for key, value in chosen.items() if key in by_name for word in _words(by_name[key], value)]
        flags = [word for key in _LAUNCHER[1:] if key in chosen for word in (f"--{key}", chosen[key])]
        launch = _read(launches[chosen["launch"]], chosen, flags)
        read = {key: by_name[key].read(value) if key in by_name else value for key, value in chosen.items()}
        cells[name] = Cell(
            name=name,
            folder=f"{number:02}-{re.sub(r'[^A-Za-z0-9.]+', '-', name)[:60].strip('-')}",
            settings={key: recordable(value, key) for key, value in read.items()},
            words=(task, *given, *run_words),
            **launch,
        )
    return [*cells.values()], varied


def _name(chosen: Mapping[str, str], varied: Sequence[str]) -> str:
    parts = [chosen["launch"]] if "launch" in varied or not varied else []
    parts += [f"{key.replace('_', '-')} {chosen[key]}" for key in varied if key != "launch" and key in chosen]
    return ", ".join(parts)


def _words(setting: Setting, value: str) -> list[str]:
    if setting.type is bool:
        return [setting.flag if setting.read(value) else f"--no-{setting.flag[2:]}"]
    return [setting.flag, value]


def _read(file: Path | None, chosen: Mapping[str, str], flags: Sequence[str]) -> dict[str, Any]:
    """How a cell is launched: the fields of `Cell` that follow from its launch file."""
    if file is None:
        precision = chosen.get("mixed_precision")
        facts = {"backend": "plain", "zero_stage": None, "offload": {"optimizer": "none", "param": "none"}}
        facts |= {"processes": 1, "precision": precision or "no"}
        environment = {PRECISION: precision} if precision else {}
        return {"launch": facts, "launcher": (sys.executable,), "environment": environment, "fingerprint": ""}
    launch = expected(Launch.from_yaml(file, *flags), this_machine_computes_bf16())
    if launch.machines > 1:
        raise UserError(
            f"--launch {chosen['launch']}: it is of {launch.machines} machines; compare starts launches here"
        )
    facts = {
        "backend": launch.backend,
        "zero_stage": launch.stage if launch.backend == "deepspeed" else None,
        "offload": {what: launch.offload(what) for what in ("optimizer", "param")},
        "processes": launch.world_size,
        "precision": launch.precision[0],
    }
    # a port of its own: one that another launch on this machine uses would only be noticed later
    words = ["-m", "accelerate.commands.launch", "--config_file", str(file), "--main_process_port", "0", *flags]
    content = launch.text + repr(launch.json)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return {"launch": facts, "launcher": (sys.executable, *words), "environment": {}, "fingerprint": digest}
