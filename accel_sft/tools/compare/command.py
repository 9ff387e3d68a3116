"""The command `compare`: measures a task's training under several launches and settings, each a real launch."""

from __future__ import annotations

import dataclasses
import hashlib
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.errors import UserError
from accel_sft.api.limits import OF_ADAPTERS
from accel_sft.api.options import Setting
from accel_sft.api.task import Task
from accel_sft.api.task_file import file_record, recorded_name
from accel_sft.io.files import expanded, made_folder, write_atomically
from accel_sft.io.lock import lock
from accel_sft.io.terminal import terminal, wrapped
from accel_sft.io.text import printable, shown
from accel_sft.launch.info import shipped
from accel_sft.launch.launcher import under_launcher
from accel_sft.launch.recordable import masked_words
from accel_sft.models.source import resolved
from accel_sft.tools.compare import rounds
from accel_sft.tools.compare.measured import completed
from accel_sft.tools.compare.record import open_record
from accel_sft.tools.compare.settings import OWN_COMMAS, SINGLE, ComparedSetting, flag_of, product, split_values

DEFAULTS = {"eval_every": "epoch", "save_every": "off"}
"""Options that a compared run gets unless the user gives them."""
TRACED_STEPS = 5
"""Number of first steps that --profile slows: the third to the fifth are traced, after one step of warm-up."""
PAGE = "comparison.html"
_FILES = "comparison.csv, comparison.json"
_PRECISIONS = ("no", "fp16", "bf16")

Parse = Callable[[Sequence[str]], tuple[set[str], Callable[[], tuple[TrainConfig, Task]]]]
"""Takes a run's words; returns the names of the options in them, and a function that gives the settings and task."""
Offers = Mapping[type, Sequence[Setting]]
"""The settings that may be varied, by the class that defines them: the trainer's and the task's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """What a comparison is asked for.

    Attributes:
        options: the values of each setting of the trainer or the task that was given.
        unsplit: the flags of settings whose values may contain commas, so that the option is repeated for each value.
        launcher: the values of `launch`, `num_processes` and `mixed_precision`.
        run_words: the words behind --, which every run gets.
        in_file: the names of the options that the YAML file `config_file` has.
        repeat: number of rounds.
        time_limit: minutes after which a run is ended.
        defaults: values of options that runs get unless the user gives them, by name.
        tool, tool_words: the command that was given, and the words of its own options. The settings in `derived` follow
            from these words, so the command is shown without them.
    """

    options: Mapping[Setting, Sequence[str]]
    unsplit: Collection[str]
    launcher: Mapping[str, Sequence[str]]
    run_words: Sequence[str]
    config_file: str | None
    in_file: Collection[str]
    repeat: int
    discard_steps: int
    time_limit: float
    keep_weights: bool
    output_dir: str | None
    dry_run: bool
    defaults: Mapping[str, str] = dataclasses.field(default_factory=lambda: DEFAULTS)
    tool: str = "compare"
    tool_words: Sequence[str] = ()
    derived: Collection[str] = ()

    @classmethod
    def read(
        cls, params: Mapping[str, Any], offers: Offers, task_class: type[Task], repeat: int, discard_steps: int
    ) -> CompareConfig:
        """Read the command line's parameters; those of a setting are the texts that were given to its options.

        Raises:
            UserError: a value is wrong.
        """
        unsplit = {setting.flag for setting in offers[task_class] if setting.type is str and not setting.choices}
        unsplit |= set(map(flag_of, OWN_COMMAS))
        options = {}
        for setting in (setting for offered in offers.values() for setting in offered):
            texts = [*params[setting.name], *(["off"] if params.get(f"no_{setting.name}") else [])]
            if texts:
                options[setting] = split_values(setting, texts, unsplit=setting.flag in unsplit)
        launcher = {name: _parts(params[name]) for name in ("launch", "num_processes", "mixed_precision")}
        launcher["launch"] = launcher["launch"] or [SINGLE]
        if wrong := [part for part in launcher["num_processes"] if not part.isdecimal() or int(part) < 1]:
            raise UserError(f"--num-processes {wrong[0]!r}: expected whole numbers from 1, commas between")
        if wrong := [part for part in launcher["mixed_precision"] if part not in _PRECISIONS]:
            raise UserError(f"--mixed-precision {wrong[0]!r}: not one of {', '.join(_PRECISIONS)}")
        file = params["config_file"]
        as_they_are = ("run_words", "config_file", "time_limit", "keep_weights", "output_dir", "dry_run")
        return cls(
            options=options,
            unsplit=unsplit,
            launcher=launcher,
            in_file=load_yaml(file, *offers)[0].keys() if file else (),
            repeat=repeat,
            discard_steps=discard_steps,
            **{name: params[name] for name in as_they_are},
        )

    @property
    def given(self) -> dict[str, list[str]]:
        """All given values by option, without secrets. A comparison can resume only with the same ones."""
        values = {flag_of(name): [*parts] for name, parts in self.launcher.items()}
        for setting, texts in self.options.items():
            values[setting.flag] = [masked_words([setting.flag, text])[1] for text in texts]
        values["the options behind --"] = [shlex.join(masked_words(self.run_words))] if self.run_words else []
        values["--config"] = [self.config_file] if self.config_file else []
        return {flag: texts for flag, texts in values.items() if texts}

    def command(self, task: str) -> str:
        """The command as the user can type it again, without secrets."""
        words = ["accel-sft", self.tool, task]
        for flag, texts in self.given.items():
            if flag in self.unsplit:
                words += [word for text in texts for word in (flag, text)]
            elif flag.startswith("--") and flag not in self.derived:
                words += [flag, ",".join(texts)]
        own = self.tool_words or ["--repeat", str(self.repeat), "--discard-steps", str(self.discard_steps)]
        words += [*own, "--time-limit", f"{self.time_limit:g}", *(["--keep-weights"] if self.keep_weights else [])]
        words += ["--output-dir", self.output_dir] if self.output_dir else []
        words += ["--", *self.run_words] if self.run_words else []
        return shlex.join(masked_words(words))


def run(task: str, task_class: type[Task], offers: Offers, params: Mapping[str, Any], parse: Parse) -> None:
    """Compare what the command line names (`CompareConfig.read`).

    Raises:
        UserError: the user must fix something (raised before the first launch), or no setting completed.
    """
    config = CompareConfig.read(params, offers, task_class, params["repeat"], params["discard_steps"])
    compare(task, task_class, config, parse)


def compare(task: str, task_class: type[Task], config: CompareConfig, parse: Parse) -> None:
    """Run every setting `repeat` times, write tables and findings, and print them; with `dry_run` print the commands.

    Raises:
        UserError: the user must fix something (raised before the first launch), or no setting completed.
    """
    if under_launcher():
        raise UserError(f"{config.tool} starts launches itself: run it without accelerate launch")
    settings, varied = settings_of(task, config, parse)
    configs, tasks = _check(settings, config.discard_steps, parse)
    if config.dry_run:
        for setting in settings:
            print(f"{setting.name}\n    {setting.shown_command(Path('FOLDER'))}", file=terminal())
        return
    usual = f"runs/compare-{recorded_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = expanded(config.output_dir or usual, "--output-dir").absolute()
    try:
        folder = made_folder(folder, mine=not config.output_dir)
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be used ({error.strerror})") from None
    lock(folder)
    wanted = {
        "task": task,
        "command": config.command(task),
        "given": config.given,
        "fingerprints": _fingerprints(settings, config.config_file, task_class),
        "varied": varied,
        "main_metric": tasks[0].main_metric,
        "higher_is_better": tasks[0].higher_is_better,
        "discard_steps": config.discard_steps,
        "repeat": config.repeat,
        "time_limit_minutes": config.time_limit,
    }
    record = open_record(folder, wanted, settings)
    for entry, run_config in zip(record["settings"], configs, strict=True):
        entry["global_batch_size"] = run_config.global_batch_size
        entry["examples_per_rank"] = run_config.global_batch_size / entry["launch"]["row_groups"]
    _describe(record, folder)
    try:
        rounds.run(record, folder, settings, keep_weights=config.keep_weights)
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"--output-dir {what}; fix it, and the same command with this folder goes on") from error
    print(f"\n{folder}: {_FILES}", file=terminal())
    if not any(completed(entry) for entry in record["settings"]):
        raise UserError("no setting came to its end; the reason of each is above")
    print(_page(folder), file=terminal())


def settings_of(task: str, config: CompareConfig, parse: Parse) -> tuple[list[ComparedSetting], list[str]]:
    """Return the settings to compare, and the names of the options that vary."""
    words = [*config.run_words]
    behind = parse(words)[0]
    for name in sorted(behind & {"output_dir", "resume", "dry_run"}):
        raise UserError(f"{flag_of(name)} behind --: each run has its own from the comparison; leave it out")
    if twice := [setting.flag for setting in config.options if setting.name in behind]:
        raise UserError(f"{', '.join(twice)}: given before and behind --; keep one")
    named = {setting.name for setting in config.options} | behind
    if config.config_file:
        words = ["--config", str(expanded(config.config_file, "--config").absolute()), *words]
        named |= {*config.in_file}
    usual = [word for name, value in config.defaults.items() if name not in named for word in (flag_of(name), value)]
    launches = {name: _launch_file(name) for name in config.launcher["launch"]}
    processes, precisions = config.launcher["num_processes"], config.launcher["mixed_precision"]
    return product(task, launches, processes, precisions, config.options, [*usual, *words])


def _launch_file(name: str) -> Path | None:
    if name == SINGLE:
        return None
    file = shipped().get(name) or expanded(name, "--launch").absolute()
    if not file.is_file():
        raise UserError(f"--launch {name!r}: no file, no name that `accel-sft launch-file` lists, and not {SINGLE}")
    return file


def _parts(texts: Sequence[str]) -> list[str]:
    """Return the parts of the texts between commas, each part once."""
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))


def _check(
    settings: Sequence[ComparedSetting], discard_steps: int, parse: Parse
) -> tuple[list[TrainConfig], list[Task]]:
    """Return the options and the task of every setting, or raise UserError with the problems of all together."""
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
            problems.append(f"{problem}: --discard-steps {TRACED_STEPS} or more leaves them out of what is measured")
        configs.append(config)
        tasks.append(task)
    if all(config.adapter == "none" for config in configs):
        varied = [name for name in OF_ADAPTERS if len({getattr(config, name) for config in configs}) > 1]
        problem = "all settings would train the same, as --adapter none has no adapter; add -- --adapter lora"
        problems += [f"{flag_of(name)}: {problem}" for name in varied]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return configs, tasks


def _fingerprints(
    settings: Sequence[ComparedSetting], config_file: str | None, task_class: type[Task]
) -> dict[str, str]:
    fingerprints = {f"--launch {setting.values['launch']}": setting.fingerprint for setting in settings}
    if file := file_record(task_class):
        fingerprints[f"the task {file['path']}"] = file["sha256"]
    if config_file:
        fingerprints[f"--config {config_file}"] = hashlib.sha256(expanded(config_file).read_bytes()).hexdigest()
    return fingerprints


def _describe(record: Mapping[str, Any], folder: Path) -> None:
    """Print what is about to be measured."""
    entries = record["settings"]
    done = sum(len(entry["runs"]) for entry in entries)
    count = f"{len(entries)}, {record['repeat']} round{'s' if record['repeat'] > 1 else ''}"
    rows = [("folder", str(folder)), ("settings", count + (f"; {done} runs are done already" if done else ""))]
    for entry in entries:
        launch = entry["launch"]
        offload = [what for what, place in launch["offload"].items() if place != "none"]
        stage = "" if launch["zero_stage"] is None else f" ZeRO-{launch['zero_stage']}"
        processes = f"{launch['processes']} process{'es' if launch['processes'] > 1 else ''}"
        offloads = f", {' and '.join(offload)} offloaded" if offload else ""
        how = f"{launch['backend']}{stage}{offloads}, {processes}, precision {launch['precision']}"
        share = f"{entry['global_batch_size']} examples a step, {shown(entry['examples_per_rank'])} on a rank"
        rows.append(("setting", f"{entry['name']}: {how}; {share}"))
    for name, text in rows:
        print(wrapped(printable(f"{name:<8}  {text}"), 10), file=terminal())


def _page(folder: Path) -> str:
    """Write the page that `report` makes and return a line that says where it is, or why it cannot be written: nothing
    is raised, as the measurements are already stored."""
    from accel_sft.tools.report.page import render
    from accel_sft.tools.report.runs import read_comparison

    try:
        page, _ = render([], [read_comparison(folder, folder.name)])
        write_atomically(folder / PAGE, page)
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"{folder / PAGE}: cannot be written ({reason}); `accel-sft report {folder}` makes it"
    return f"{folder / PAGE}: open it in a browser"
