"""Reads the task's settings from a run's record, for other commands. For checking a finished run, computes digests of
what decided the run's numbers, and writes a manifest of its folder.

Checkpoints also hold these digests, and the hash chain over the lines of metrics.jsonl. Needs no torch.
"""

import hashlib
import json
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from accel_sft.api.config import LAYOUT
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, NAMES_A_FILE, Setting
from accel_sft.io import manifest
from accel_sft.io.files import mapping
from accel_sft.io.run_dir import RunDir


def recorded_options(
    record: Mapping[str, Any],
    task_settings: Sequence[Setting],
    given: Collection[str] | None,
    where: str,
    *,
    same_data: bool,
) -> dict[str, Any]:
    """Return the settings of a run's task from its record, without those in `given` (None: the command takes no
    settings of a task). Another person's record could name any file of this machine, so files in a record are read
    only with `same_data`."""
    before = record["task_options"]
    mine = [s for s in task_settings if s.name in before.keys() - {*(given or ())}]
    hidden = [s for s in mine if HIDDEN in str(before[s.name])]
    flags = " and ".join(s.flag for s in hidden)
    if hidden and (given is not None or any(s.required for s in hidden)):
        raise UserError(f"{where}: secrets are not in its record; give {flags} again")
    if hidden:
        print(f"note: {where}: secrets are not in its record, so the default of {flags} is used", file=sys.stderr)
    mine = [s for s in mine if s not in hidden]
    if problems := [line for s in mine if (line := s.problem(before[s.name]))]:
        raise UserError(*(f"{line}; the run.json of {where} says so" for line in problems))
    files = [s for s in mine if NAMES_A_FILE.search(s.name) and before[s.name] != s.default]
    if files and not same_data:
        named = " ".join(f"{s.flag} {shlex.quote(str(before[s.name]))}" for s in files)
        option = "--same-data" if given is None else f"--same-data, or {named}"
        raise UserError(f"{where}: its record names files, which are read only if you ask for that; add {option}")
    return {s.name: before[s.name] for s in mine}


def made_by(record: Mapping[str, Any]) -> dict[str, Any]:
    """What decided a run's numbers, from its run.json: digests of settings (without those that a resume may change),
    data and code, and the libraries' versions. None stands for a digest that older versions did not record."""
    config = {name: value for name, value in record["config"].items() if name not in LAYOUT}
    settings = [record["task"], config, record["task_options"], record.get("total_steps")]
    return {
        "settings": hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest(),
        "data": record.get("data_sha256"),
        "task_code": record.get("task_code"),
        "package_code": record.get("package_code"),
        "versions": mapping(record.get("launch")).get("versions"),
    }


def other_versions(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A phrase for each library of `then` whose version is different now."""
    return [f"{name} {then[name]}, here {now.get(name)}" for name in then if then[name] != now.get(name)]


def write_manifest(run_dir: RunDir, result: str, about: dict[str, Any]) -> None:
    """Write the manifest of a finished run's folder, without logs, traces and the trackers' files. The manifest
    is written before result.json, whose text is `result`: a run killed in between is unfinished, and rewrites both."""
    content = result.encode()
    entries = {run_dir.result.name: [len(content), hashlib.sha256(content).hexdigest()]}
    manifest.write(run_dir.path, about, entries, among=listed(run_dir) | entries.keys())


def listed(run_dir: RunDir) -> set[str]:
    """Names of the existing files that a finished run's manifest lists, without result.json."""
    alone = [run_dir.record, run_dir.settings, run_dir.launch, run_dir.deepspeed, run_dir.metrics, run_dir.nonfinite]
    alone += [run_dir.resamples, run_dir.report, run_dir.batching, run_dir.most_tokens]
    folders = run_dir.base, run_dir.best, run_dir.final, run_dir.final_plain, run_dir.samples
    within = [path for folder in folders for path in folder.rglob("*")]
    saved = [folder / manifest.MANIFEST for folder in run_dir.all_checkpoints()]
    return {str(path.relative_to(run_dir.path)) for path in (*alone, *within, *saved) if path.is_file()}
