"""The command `compare`: trains a task under several launch files and options, and compares the measurements."""

from __future__ import annotations

import hashlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.errors import UserError
from accel_sft.api.limits import OF_ADAPTERS
from accel_sft.api.options import Setting, flag_of
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record, recorded_name
from accel_sft.io.files import expanded, made_folder, write_atomically
from accel_sft.io.lock import lock
from accel_sft.io.terminal import terminal
from accel_sft.launch.info import shipped
from accel_sft.launch.launcher import under_launcher
from accel_sft.launch.recordable import masked_words
from accel_sft.models.source import resolved
from accel_sft.tools.compare import rounds
from accel_sft.tools.compare.measured import completed
from accel_sft.tools.compare.settings import OWN_COMMAS, SINGLE, ComparedSetting, product, split_values
from accel_sft.tools.report.page import render
from accel_sft.tools.report.runs import read_comparison

DEFAULTS = {"eval_every": "epoch", "save_every": "off"}
"""Options that a compared run gets unless the user gives them."""
TRACED_STEPS = 5
"""Number of first steps that --profile slows: it traces the third to the fifth, and warms up in the second."""
PAGE = "comparison.html"
_PRECISIONS = ("no", "fp16", "bf16")

Parse = Callable[[Sequence[str]], tuple[set[str], Callable[[], tuple[TrainConfig, Task]]]]
"""Takes a run's command-line words; returns the names of the given options, and a function for settings and task."""
Offers = Mapping[type, Sequence[Setting]]
"""Maps a class that defines settings (the trainer's or the task's) to its settings that may be varied."""
Params = Mapping[str, Any]
"""The command line's parameters: the texts given for each setting in `Offers`, the command's own options
(`cli.options.COMPARISON`), `config_file`, and `run_words`: the words after `--`, which every run gets."""


def run(
    task: str,
    task_class: type[Task],
    offers: Offers,
    params: Params,
    parse: Parse,
    defaults: Mapping[str, str] = DEFAULTS,
) -> None:
    """Run every setting `repeat` times, and write and print tables and findings; with `dry_run`, only print commands.
    `defaults` maps options to the values that runs get unless the user gives others."""
    if under_launcher():
        raise UserError("compare and how-much start launches themselves: run them without accelerate launch")
    settings, varied = settings_of(task, task_class, offers, params, parse, defaults)
    of_run = _check(settings, params["discard_steps"], parse)
    if params["dry_run"]:
        for setting in settings:
            print(f"{setting.name}\n    {setting.shown_command(Path('FOLDER'))}", file=terminal())
        return
    usual = f"runs/compare-{recorded_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = expanded(params["output_dir"] or usual, "--output-dir").absolute()
    try:
        folder = made_folder(folder, mine=not params["output_dir"])
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be used ({error.strerror}); name another folder") from None
    lock(folder)
    wanted = {
        "task": task,
        "command": shlex.join(["accel-sft", *masked_words(sys.argv[1:])]),
        "fingerprints": _fingerprints(params["config_file"], task_class),
        "varied": varied,
        "main_metric": of_run.main_metric,
        "higher_is_better": of_run.higher_is_better,
        "discard_steps": params["discard_steps"],
        "repeat": params["repeat"],
        "time_limit_minutes": params["time_limit"],
    }
    record = rounds.open_record(folder, wanted, settings)
    done = sum(len(entry["runs"]) for entry in record["settings"])
    print(f"folder    {folder}", file=terminal())
    print(f"settings  {len(settings)}, {params['repeat']} runs of each; {done} runs are done already", file=terminal())
    try:
        rounds.run(record, folder, settings, keep_weights=params["keep_weights"])
        print(f"\n{folder}: comparison.csv, comparison.json", file=terminal())
        if not any(completed(entry) for entry in record["settings"]):
            raise UserError("no setting completed; the reasons are above")
        write_atomically(folder / PAGE, render([], [read_comparison(folder, folder.name)]))
    except OSError as error:
        problem = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"--output-dir {problem}; fix this, and repeat the command with this folder") from error
    print(f"{folder / PAGE}: open it in a browser", file=terminal())


def settings_of(
    task: str, task_class: type[Task], offers: Offers, params: Params, parse: Parse, defaults: Mapping[str, str]
) -> tuple[list[ComparedSetting], list[str]]:
    """Return the settings to compare, and the names of the options that vary."""
    options = _options(task_class, offers, params)
    launches, processes, precisions = (
        list(dict.fromkeys(part.strip() for text in params[name] for part in text.split(",")))
        for name in ("launch", "num_processes", "mixed_precision")
    )
    if wrong := [part for part in processes if not part.isdecimal() or int(part) < 1]:
        raise UserError(f"--num-processes {wrong[0]!r}: expected whole numbers from 1, separated by commas")
    if wrong := [part for part in precisions if part not in _PRECISIONS]:
        raise UserError(f"--mixed-precision {wrong[0]!r}: expected one of {', '.join(_PRECISIONS)}")
    words, named = [*params["run_words"]], {setting.name for setting in options}
    behind = parse(words)[0]
    for name in sorted(behind & {"output_dir", "resume", "dry_run"}):
        raise UserError(f"{flag_of(name)} after --: the comparison sets this option for each run; leave it out")
    if twice := [flag_of(name) for name in sorted(named & behind)]:
        raise UserError(f"{', '.join(twice)}: given both before and after --; give each once")
    named |= behind
    if file := params["config_file"]:
        words = ["--config", str(expanded(file, "--config").absolute()), *words]
        named |= load_yaml(file, *offers)[0].keys()
    usual = [word for name, value in defaults.items() if name not in named for word in (flag_of(name), value)]
    files = {name: _launch_file(name) for name in launches or [SINGLE]}
    return product(task, files, processes, precisions, options, [*usual, *words])


def _options(task_class: type[Task], offers: Offers, params: Params) -> dict[Setting, list[str]]:
    """The values given for each setting, split at commas, except a task's texts: these may contain commas."""
    options = {}
    for owner, offered in offers.items():
        for setting in offered:
            texts = [*params[setting.name], *(["off"] if params.get(f"no_{setting.name}") else [])]
            is_text = owner is task_class and setting.type is str and not setting.choices
            if texts:
                options[setting] = split_values(setting, texts, unsplit=is_text or setting.name in OWN_COMMAS)
    return options


def _launch_file(name: str) -> Path | None:
    if name == SINGLE:
        return None
    file = shipped().get(name) or expanded(name, "--launch").absolute()
    if not file.is_file():
        raise UserError(f"--launch {name!r}: expected a file, a name that `accel-sft launch-file` lists, or {SINGLE}")
    return file


def _check(settings: Sequence[ComparedSetting], discard_steps: int, parse: Parse) -> Task:
    """Return the task of the first setting, or raise UserError with the problems of all settings together."""
    configs, tasks = [], []
    problems: list[str] = []
    for setting in settings:
        try:
            config, task = parse(setting.words[1:])[1]()
        except UserError as error:
            problems += error.problems
            continue
        config = resolved(config, task)
        if config.max_steps is not None and config.max_steps <= discard_steps:
            problem = f"--max-steps {config.max_steps}: the first {discard_steps} are not counted (--discard-steps)"
            problems.append(f"{problem}; train more steps, or discard fewer")
        if config.profile and discard_steps < TRACED_STEPS:
            problem = f"--profile slows the first {TRACED_STEPS} steps"
            problems.append(f"{problem}: --discard-steps {TRACED_STEPS} or more leaves them out of the measurements")
        configs.append(config)
        tasks.append(task)
    if all(config.adapter == "none" for config in configs):
        varied = [name for name in OF_ADAPTERS if len({getattr(config, name) for config in configs}) > 1]
        problem = "all settings would train the same, because --adapter none has no adapter; add -- --adapter lora"
        problems += [f"{flag_of(name)}: {problem}" for name in varied]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return tasks[0]


def _fingerprints(config_file: str | None, task_class: type[Task]) -> dict[str, str]:
    """Map descriptions of the task's file and of the --config file to each file's SHA-256; leave out missing files."""
    fingerprints = {}
    if file := file_record(task_class):
        fingerprints[f"the task {file['path']}"] = file["sha256"]
    if config_file:
        fingerprints[f"--config {config_file}"] = hashlib.sha256(expanded(config_file).read_bytes()).hexdigest()
    return fingerprints
