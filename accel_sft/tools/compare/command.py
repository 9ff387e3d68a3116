"""The command `compare`: measures a task's training under several launches and settings, each cell a real launch."""

import hashlib
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.api.adapters import OF_ADAPTERS
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import load_yaml
from accel_sft.api.errors import UserError
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
from accel_sft.tools.compare.cells import OWN_COMMAS, PRECISIONS, SINGLE, Cell, flag_of, product, values
from accel_sft.tools.compare.record import open_record
from accel_sft.tools.compare.summary import completed

DEFAULTS = {"eval_every": "epoch", "save_every": "off"}
"""Options that a compared run gets unless the user gives them."""
TRACED_STEPS = 5
"""Number of first steps that --profile slows: the third to the fifth are traced, after one step of warm-up."""
PAGE = "comparison.html"
_FILES = ("comparison.md", "comparison.csv", "comparison.json")
_ITS_OWN = ("output_dir", "resume", "dry_run")
"""Options that the comparison sets for each run, so the user may not give them after --."""

Parse = Callable[[Sequence[str]], tuple[set[str], Callable[[], tuple[TrainConfig, Task]]]]
"""Takes a run's words; returns the names of the options in them, and a function that gives the settings and task."""


def run(
    task: str,
    task_class: type[Task],
    offers: Mapping[type, Sequence[Setting]],
    asked: Mapping[str, Any],
    parse: Parse,
) -> None:
    """Run every cell `repeat` times, write tables and findings, and print them.

    Args:
        offers: the settings that may be varied, by the class that defines them.
        asked: the command line's parameters by name; for a setting, the texts that the user gave. A command that
            compares by options of its own adds its name (`command`), those options (`own`), the flags that they stand
            for (`stand_for`), and what its runs get in place of DEFAULTS (`defaults`).
    Raises:
        UserError: the user must fix something (raised before the first launch), or no cell completed.
    """
    if under_launcher():
        raise UserError("compare starts launches itself: run it without accelerate launch")
    cells, varied, given = cells_of(task, task_class, offers, asked, parse)
    configs, tasks = _check(cells, asked["discard_steps"], parse)
    if asked["dry_run"]:
        for cell in cells:
            print(f"{cell.name}\n    {cell.shown_command(Path('FOLDER'))}", file=terminal())
        return
    usual = f"runs/compare-{recorded_name(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = expanded(asked["output_dir"] or usual, "--output-dir").absolute()
    try:
        folder = made_folder(folder, mine=not asked["output_dir"])
    except OSError as error:
        raise UserError(f"--output-dir {folder}: cannot be used ({error.strerror})") from None
    lock(folder)
    wanted = {
        "task": task,
        "command": _command(task, given, asked, _whole(task_class, offers)),
        "given": given,
        "fingerprints": _fingerprints(cells, asked["config_file"], task_class),
        "varied": varied,
        "main_metric": tasks[0].main_metric,
        "higher_is_better": tasks[0].higher_is_better,
        "discard_steps": asked["discard_steps"],
        "repeat": asked["repeat"],
        "time_limit_minutes": asked["time_limit"],
    }
    record = open_record(folder, wanted, cells)
    for entry, config in zip(record["cells"], configs, strict=True):
        entry["global_batch_size"] = config.global_batch_size
        entry["examples_per_rank"] = config.global_batch_size / entry["launch"].get(
            "row_groups", entry["launch"]["processes"]
        )
    _describe(record, folder, cells)
    try:
        rounds.run(record, folder, cells, keep_weights=asked["keep_weights"])
    except OSError as error:
        what = f"{error.filename or folder}: {error.strerror or error}"
        raise UserError(f"--output-dir {what}; fix it, and the same command with this folder goes on") from error
    if not any(completed(entry) for entry in record["cells"]):
        print(f"\n{folder}: {', '.join(_FILES)}", file=terminal())
        raise UserError("no cell came to its end; each one's reason is above")
    page = _page(folder)
    print(f"\n{folder}: {', '.join(_FILES)}\n{page}", file=terminal())


def _page(folder: Path) -> str:
    """Write the page that `report` makes and return a line that says where it is.

    If the page cannot be written, the line says so, and nothing is raised: the measurements are already stored.
    """
    from accel_sft.tools.report.comparison import read_comparison
    from accel_sft.tools.report.page import render

    try:
        page, _ = render([], [read_comparison(folder, folder.name)])
        write_atomically(folder / PAGE, page)
    except (OSError, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return f"{folder / PAGE}: cannot be written ({reason}); `accel-sft report {folder}` makes it"
    return f"{folder / PAGE}: open it in a browser"


def cells_of(
    task: str,
    task_class: type[Task],
    offers: Mapping[type, Sequence[Setting]],
    asked: Mapping[str, Any],
    parse: Parse,
) -> tuple[list[Cell], list[str], dict[str, list[str]]]:
    """Return the cells, the names of the options that vary, and all given values by option."""
    options: dict[Setting, list[str]] = {}
    whole = _whole(task_class, offers)
    for settings in offers.values():
        for setting in settings:
            texts = [*asked[setting.name], *(["off"] if asked.get(f"no_{setting.name}") else [])]
            if texts:
                options[setting] = values(setting, texts, whole=setting.flag in whole)
    words = list(asked["run_words"])
    behind = parse(words)[0]
    for name in sorted(behind & {*_ITS_OWN}):
        raise UserError(f"{flag_of(name)} behind --: each run has its own from the comparison; leave it out")
    if twice := [setting.flag for setting in options if setting.name in behind]:
        raise UserError(f"{', '.join(twice)}: given before and behind --; keep one")
    named = {setting.name for setting in options} | behind
    if asked["config_file"]:
        words = ["--config", str(expanded(asked["config_file"], "--config").absolute()), *words]
        named |= load_yaml(asked["config_file"], *offers)[0].keys()
    defaults = asked.get("defaults", DEFAULTS)
    usual = [word for name, value in defaults.items() if name not in named for word in (flag_of(name), value)]
    processes = _numbers("--num-processes", asked["num_processes"])
    precisions = _parts(asked["mixed_precision"])
    if wrong := [part for part in precisions if part not in PRECISIONS]:
        raise UserError(f"--mixed-precision {wrong[0]!r}: not one of {', '.join(PRECISIONS)}")
    launches = _launches(asked["launch"] or (SINGLE,))
    cells, varied = product(task, launches, processes, precisions, options, [*usual, *words])
    given = {"--launch": [*launches], "--num-processes": processes, "--mixed-precision": precisions}
    given |= {each.flag: [masked_words([each.flag, value])[1] for value in found] for each, found in options.items()}
    given |= {"the options behind --": [shlex.join(masked_words(asked["run_words"]))] if behind else []}
    given |= {"--config": [asked["config_file"]] if asked["config_file"] else []}
    return cells, varied, {name: found for name, found in given.items() if found}


def _launches(texts: Sequence[str]) -> dict[str, Path | None]:
    """Launch files by the names they were given with."""
    found: dict[str, Path | None] = {}
    for name in _parts(texts):
        found[name] = None if name == SINGLE else shipped().get(name) or expanded(name, "--launch").absolute()
        if (file := found[name]) and not file.is_file():
            raise UserError(f"--launch {name!r}: no file, no name that `accel-sft launch-file` lists, and not {SINGLE}")
    return found


def _numbers(flag: str, texts: Sequence[str]) -> list[str]:
    found = _parts(texts)
    if wrong := [part for part in found if not part.isdecimal() or int(part) < 1]:
        raise UserError(f"{flag} {wrong[0]!r}: expected whole numbers from 1, commas between")
    return found


def _parts(texts: Sequence[str]) -> list[str]:
    """Return the parts of the texts between commas, each part once."""
    return list(dict.fromkeys(part.strip() for text in texts for part in text.split(",")))


def _check(cells: Sequence[Cell], discard_steps: int, parse: Parse) -> tuple[list[TrainConfig], list[Task]]:
    """Return the settings and the task of every cell, or raise UserError with the problems of all cells together."""
    configs, tasks = [], []
    problems: list[str] = []
    for cell in cells:
        try:
            config, task = parse(cell.words[1:])[1]()
        except UserError as error:
            problems += error.problems
            continue
        config = resolved(config, task)
        if config.max_steps is not None and config.max_steps <= discard_steps:
            told = f"--max-steps {config.max_steps}: the first {discard_steps} are not counted (--discard-steps)"
            problems.append(f"{told}; train more steps, or discard fewer")
        if config.profile and discard_steps < TRACED_STEPS:
            told = f"--profile slows the first {TRACED_STEPS} steps"
            problems.append(f"{told}: --discard-steps {TRACED_STEPS} or more leaves them out of what is measured")
        configs.append(config)
        tasks.append(task)
    if all(config.adapter == "none" for config in configs):
        varied = [name for name in OF_ADAPTERS if len({getattr(config, name) for config in configs}) > 1]
        told = "all cells would train the same, as --adapter none has no adapter; add -- --adapter lora"
        problems += [f"{flag_of(name)}: {told}" for name in varied]
    if problems:
        raise UserError(*dict.fromkeys(problems))
    return configs, tasks


def _fingerprints(cells: Sequence[Cell], config_file: str | None, task_class: type[Task]) -> dict[str, str]:
    found = {f"--launch {cell.settings['launch']}": cell.fingerprint for cell in cells}
    if file := file_record(task_class):
        found[f"the task {file['path']}"] = file["sha256"]
    if config_file:
        found[f"--config {config_file}"] = hashlib.sha256(expanded(config_file).read_bytes()).hexdigest()
    return found


def _whole(task_class: type[Task], offers: Mapping[type, Sequence[Setting]]) -> set[str]:
    """The options whose values may contain commas, so they are never split at commas."""
    texts = {each.flag for each in offers[task_class] if each.type is str and not each.choices}
    return texts | set(map(flag_of, OWN_COMMAS))


def _command(task: str, given: Mapping[str, Sequence[str]], asked: Mapping[str, Any], whole: Collection[str]) -> str:
    """The command as the user can type it again, without secrets; an option in `whole` is repeated for each value."""
    words = ["accel-sft", asked.get("command", "compare"), task]
    for flag, found in given.items():
        if flag.startswith("--") and flag not in asked.get("stand_for", ()):
            words += [word for value in found for word in (flag, value)] if flag in whole else [flag, ",".join(found)]
    words += asked.get("own", ["--repeat", str(asked["repeat"]), "--discard-steps", str(asked["discard_steps"])])
    words += ["--time-limit", f"{asked['time_limit']:g}", *(["--keep-weights"] if asked["keep_weights"] else [])]
    if asked["output_dir"]:
        words += ["--output-dir", asked["output_dir"]]
    words += ["--", *asked["run_words"]] if asked["run_words"] else []
    return shlex.join(masked_words(words))


def _describe(record: Mapping[str, Any], folder: Path, cells: Sequence[Cell]) -> None:
    """Print what is about to be measured."""
    done = sum(len(entry["runs"]) for entry in record["cells"])
    rounds_of = f"{len(cells)}, {record['repeat']} round{'s' if record['repeat'] > 1 else ''}"
    rows = [("folder", str(folder)), ("cells", rounds_of + (f"; {done} runs are done already" if done else ""))]
    for entry in record["cells"]:
        launch = entry["launch"]
        offload = [what for what, place in launch["offload"].items() if place != "none"]
        stage = "" if launch["zero_stage"] is None else f" ZeRO-{launch['zero_stage']}"
        count = f"{launch['processes']} process{'es' if launch['processes'] > 1 else ''}"
        offloads = f", {' and '.join(offload)} offloaded" if offload else ""
        how = f"{launch['backend']}{stage}{offloads}, {count}, precision {launch['precision']}"
        share = f"{entry['global_batch_size']} examples a step, {shown(entry['examples_per_rank'])} on a rank"
        rows.append(("cell", f"{entry['name']}: {how}; {share}"))
    for name, text in rows:
        print(wrapped(printable(f"{name:<8}  {text}"), 10), file=terminal())
