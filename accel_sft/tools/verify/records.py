"""Compares a run's files with each other, and with this machine's data, code and libraries. Needs no torch."""

import dataclasses
import hashlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from accel_sft.api import registry
from accel_sft.api.config import TrainConfig
from accel_sft.api.config_file import TASK
from accel_sft.api.errors import UserError
from accel_sft.api.options import HIDDEN, settings
from accel_sft.io import manifest
from accel_sft.io.files import mapping
from accel_sft.io.findings import Finding
from accel_sft.io.lock import is_locked
from accel_sft.io.run_dir import RunDir, step_of
from accel_sft.io.run_record import listed, made_by, other_versions
from accel_sft.launch.recordable import versions
from accel_sft.models.source import find_source, other_base
from accel_sft.rows.fingerprint import code_fingerprint, task_record
from accel_sft.tracking.metrics_file import chained, read_lines
from accel_sft.training.state import learning_rate

LEVELS = ("differs", "open", "holds")
"""Verdicts on a file or a segment of steps, the worst first. `open` means that this machine cannot decide."""


def holds(subject: str, what: str) -> Finding:
    return Finding("holds", what, subject=subject)


def differs(subject: str, what: str) -> Finding:
    return Finding("differs", what, subject=subject)


def undecided(subject: str, what: str) -> Finding:
    return Finding("open", what, subject=subject)


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A run as its folder records it."""

    run_dir: RunDir
    record: dict[str, Any]
    lines: list[dict[str, Any]]  # of metrics.jsonl
    saved: dict[int, dict[str, Any]]  # by step, the manifest's information on each undamaged checkpoint
    damaged: dict[str, str]  # by name, the defect of each damaged checkpoint

    @classmethod
    def read(cls, run_dir: RunDir) -> "Recorded":
        """Read a run's folder, with every byte of its checkpoints; raise UserError if a file cannot be read."""
        saved, damaged = {}, {}
        for path in run_dir.all_checkpoints():
            try:
                saved[step_of(path)] = manifest.verify(path)
            except (manifest.Damaged, OSError) as damage:
                if path.is_dir():  # a run that still trains may have removed it since
                    damaged[path.name] = str(damage)
        try:
            return cls(run_dir, run_dir.read_record(), read_lines(run_dir.metrics), saved, damaged)
        except OSError as error:
            raise UserError(f"{run_dir.metrics}: cannot be read ({error.strerror or error})") from None

    @property
    def complete(self) -> bool:
        return self.run_dir.read_status() == "complete"

    @property
    def machines(self) -> int:
        return int(mapping(self.record.get("launch")).get("machines") or 1)

    @property
    def trained(self) -> list[dict[str, Any]]:
        """The lines of steps, without those of evaluations."""
        return [line for line in self.lines if "loss" in line]

    @property
    def last_step(self) -> int:
        return max((line["step"] for line in self.trained), default=0)


_UNREADABLE = (UserError, LookupError, TypeError, ValueError, AttributeError, AssertionError, OSError, yaml.YAMLError)
"""Errors that reading a changed file may raise."""


def examine(run: Recorded) -> Iterator[Finding]:
    """Yield the findings about the run's files, and about the data, code and libraries here."""
    for part in (_folder, _checkpoints, _settings, _log, _software, _base, _data):
        try:
            yield from part(run)
        except _UNREADABLE as error:
            yield differs("run.json", f"its records cannot be understood ({type(error).__name__}: {error})")


def _folder(run: Recorded) -> Iterator[Finding]:
    """Compare the folder's files with the manifest that a finished run leaves there."""
    path = run.run_dir.path / manifest.MANIFEST
    if not path.exists():
        if run.complete:
            yield differs(path.name, "is missing, although a finished run has one")
        else:
            yield undecided(path.name, "the run has not ended: its exported weights and samples are not recorded yet")
        return
    try:
        changes = list(manifest.differences(run.run_dir.path))
        added = listed(run.run_dir) - manifest.entries(run.run_dir.path).keys()
        changes += [(name, "was added: the run did not write it") for name in sorted(added)]
    except (manifest.Damaged, OSError) as damage:
        changes = [(path.name, f"is not as it was written: {damage}")]
    yield from (differs(*change) for change in changes)
    if not changes:
        count = len(manifest.paths(run.run_dir.path))
        yield holds(path.name, f"{count} files are as they were when the run ended, exported weights among them")


def _checkpoints(run: Recorded) -> Iterator[Finding]:
    """Check that checkpoints are as written, were made as run.json records, and were not replaced or removed."""
    changed: dict[str, str] = {}
    for step, about in run.saved.items():
        name = run.run_dir.checkpoint(step).name
        if about["step"] != step:
            changed[name] = f"it was written as the checkpoint of step {about['step']}"
        for earlier, identity in mapping(about.get("before")).items():
            folder = run.run_dir.checkpoints / Path(earlier).name
            if folder.is_dir() and manifest.identity(folder) != identity and earlier not in run.damaged:
                changed.setdefault(earlier, f"it is not the checkpoint that was there when {name} was written")
    yield from _makers(run)
    for name, what in {**run.damaged, **changed}.items():
        yield differs(name, what)
    if run.saved:
        *_, (newest, about) = run.saved.items()
        remaining = [] if is_locked(run.run_dir.path) else about["kept"]  # a running training removes checkpoints
        for step in sorted({*remaining} - {step_of(path) for path in run.run_dir.all_checkpoints()}):
            yield differs(run.run_dir.checkpoint(step).name, f"is missing; it was there when step {newest} was saved")
        if not (changed or run.damaged):
            count = "1 checkpoint is" if len(run.saved) == 1 else f"{len(run.saved)} checkpoints are"
            yield holds("checkpoints", f"{count} as written, of steps {', '.join(map(str, run.saved))}")


def _makers(run: Recorded) -> Iterator[Finding]:
    """Report checkpoints that were made with other settings, data or software than run.json records."""
    recorded = made_by(run.record)
    for step, about in run.saved.items():
        if other := [what for what in recorded if about["made_by"].get(what) != recorded[what]]:
            what = f"written with other {' and '.join(other).replace('_', ' ')} than run.json records"
            by_software = {"versions", "package_code"} & {*other}  # a resume may have used other software
            yield (undecided if by_software else differs)(run.run_dir.checkpoint(step).name, what)


def _settings(run: Recorded) -> Iterator[Finding]:
    """Compare run.yaml with run.json, and the learning rates of all steps with the schedule."""
    findings, file = [], run.run_dir.settings
    recorded = {**run.record["config"], **run.record["task_options"]}
    again = mapping(yaml.safe_load(file.read_text(encoding="utf-8"))) if file.is_file() else {}
    if not file.is_file():
        findings.append(differs(file.name, "is missing"))
    for name, value in again.items():
        hidden = value == HIDDEN and HIDDEN in str(recorded.get(name))
        if name != TASK and not hidden and recorded.get(name, value) != value:
            findings.append(differs("run.yaml", f"{name} is {value}, but {recorded[name]} in run.json"))
    names = {setting.name for setting in settings(TrainConfig)}
    config = TrainConfig(**{name: value for name, value in run.record["config"].items() if name in names})
    total = run.record.get("total_steps")
    steps = run.trained if total and not config.problems() else []
    for line in steps:
        rate = learning_rate(line["step"] - 1, int(total or 0), config)
        if not math.isclose(rate, line["learning_rate"] or 0, rel_tol=1e-9):
            what = f"step {line['step']} had learning rate {line['learning_rate']}, but run.json gives {rate}"
            findings.append(differs("metrics.jsonl", f"{what}; further steps are not compared"))
            break
    yield from findings
    if not findings:
        yield holds("settings", f"run.yaml, run.json and the learning rates of {len(steps)} steps agree")


def _log(run: Recorded) -> Iterator[Finding]:
    """Check that the lines of metrics.jsonl are complete, in order, and the same as when checkpoints were written."""
    name = run.run_dir.metrics.name
    steps = [line["step"] for line in run.trained]
    if wrong := next((at for at, step in enumerate(steps, 1) if step != at), None):
        yield differs(name, f"the line of step {steps[wrong - 1]} is where that of step {wrong} is expected")
    content = run.run_dir.metrics.read_bytes() if run.run_dir.metrics.is_file() else b""
    chains = [""]
    for line in content.splitlines(keepends=True):
        chains.append(chained(chains[-1], line))
    ends = {step: chains.index(about["chain"]) for step, about in run.saved.items() if about["chain"] in chains}
    if lost := sorted(run.saved.keys() - ends.keys()):
        same = [step for step in ends if step < lost[0]]
        since = f"after step {max(same)} and " if same else ""
        yield differs(name, f"lines {since}up to step {lost[0]} have changed since that step's checkpoint")
    elif ends:
        later = len(chains) - 1 - ends[max(ends)]
        yield holds(name, f"the lines up to step {max(ends)} are as they were when checkpoints were written")
        if later and not run.complete:
            yield undecided(name, f"the last {later} lines were written after the last checkpoint")


def _software(run: Recorded) -> Iterator[Finding]:
    """Compare the versions of libraries, and the files of accel_sft and of the task."""
    then, now = mapping(run.record["launch"]).get("versions"), versions()
    if other := other_versions(mapping(then), now):
        yield undecided("versions", f"the run had {'; '.join(other)}, so bits may differ")
        return
    if run.record["package_code"] != code_fingerprint():
        yield differs("code", f"accel_sft's files differ from the run's, although both are version {now['accel-sft']}")
        return
    findings = [*_task(run.record)]
    yield from findings or [holds("code", "accel_sft, the task and the libraries' versions are those of the run")]


def _task(record: dict[str, Any]) -> Iterator[Finding]:
    """Yield what differs from the run's task: its file, its package's files, or versions of imported libraries."""
    if file := record.get("task_file"):
        if not Path(file["path"]).is_file() or digest_of(Path(file["path"])) != file["sha256"]:
            yield differs("task", f"{file['path']} differs from the file that the run used")
    elif record.get("task_code"):
        try:
            task = registry.load(record["task"])
        except UserError as error:
            yield undecided("task", error.problems[0])
            return
        now = task_record(task)
        if now["task_code"] is None:
            what = "not compared, because a library that the task imports is not installed here as a package"
            yield undecided("task", what)
        elif other := other_versions(record["task_libraries"], now["task_libraries"]):
            yield undecided("task", f"the task's libraries differ ({'; '.join(other)}), so bits may differ")
        if now["task_code"] not in (None, record["task_code"]):
            place = sys.modules[task.__module__.partition(".")[0]].__file__
            yield differs("task", f"the files of its package differ from the run's: {Path(str(place)).parent}")


def _base(run: Recorded) -> Iterator[Finding]:
    """Compare the base weights of the run's adapter with those that it was trained on."""
    if run.record.get("base_weights") and (run.run_dir.final / "adapter_config.json").is_file():
        yield from (differs("base", line) for line in other_base(find_source(str(run.run_dir.final))))


def _data(run: Recorded) -> Iterator[Finding]:
    """Compare the files of rows, looked up from the folder in which this command was started."""
    files = {name: digest for split in mapping(run.record.get("data_files")).values() for name, digest in split}
    same, gone = [], []
    for name, digest in files.items():
        if not Path(name).is_file():
            gone.append(name)
        elif digest_of(Path(name)) == digest:
            same.append(name)
        else:
            yield differs(name, "its content is not what the run was trained on")
    if same:
        yield holds("data", f"unchanged since the run: {', '.join(same)}")
    if gone:
        yield undecided("data", f"not found from this folder: {', '.join(gone)}")


def digest_of(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
