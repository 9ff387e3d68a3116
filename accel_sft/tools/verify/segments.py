"""Runs segments of a run's steps again in a temporary folder, and compares both runs."""

import dataclasses
import itertools
import json
import math
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from accel_sft.io import manifest
from accel_sft.io.files import mapping, read_text
from accel_sft.io.findings import Finding
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.run_dir import RunDir
from accel_sft.io.text import LONGEST_ERROR, one_line
from accel_sft.launch.child import kill_all, launch
from accel_sft.results.run_report import COSTS
from accel_sft.tools.verify.records import Recorded, differs, digest_of, holds, undecided
from accel_sft.tracking.disturbed import KEY
from accel_sft.tracking.metrics_file import read_lines

_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_MEASURED = {"seconds", "tokens_per_second", "tokens_per_second_per_device", "mfu", KEY, *COSTS}
"""Keys of metrics.jsonl for times and speeds, whose values differ in a second run."""
_ALL = "1000000"
"""--keep-checkpoints for running a segment: so many that the checkpoint at its end stays until it is compared."""
_COMPUTED = {"loss", "grad_norm"}
"""Keys of a step's line that rounding changes; all others are a function of data and settings."""
_REFUSED = "the run was started with"
"""Part of each message with which a resume refuses settings, data, code or weights that have changed."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Steps `begin`+1 to `end`. There is a checkpoint at both ends, except at the run's start and end."""

    begin: int
    end: int

    @property
    def steps(self) -> int:
        return self.end - self.begin

    def __str__(self) -> str:
        return f"steps {self.begin + 1} to {self.end}"


def candidates(run: Recorded, *, from_start: bool) -> list[Segment]:
    """The segments between undamaged checkpoints, and from the last one to the end of a finished run; none for a run on
    several machines. The segment from step 0 is included with `from_start`, or if another segment is as long."""
    if run.machines > 1:
        return []
    ends = [*run.saved]
    if run.complete and run.last_step > max(ends, default=0):
        ends.append(run.last_step)
    segments = [Segment(*pair) for pair in itertools.pairwise(ends)]
    if ends and (from_start or ends[0] <= max((segment.steps for segment in segments), default=0)):
        segments.insert(0, Segment(0, ends[0]))
    return segments


def chosen(possible: Sequence[Segment], count: int, seed: int) -> list[Segment]:
    """Draw `count` of the segments, each with the same chance, so that every step has the same chance too."""
    drawn = random.Random(seed).sample(possible, min(count, len(possible)))
    return sorted(drawn, key=lambda segment: segment.begin)


def conclusions(run: Recorded, possible: Sequence[Segment], again: Sequence[Segment]) -> list[str]:
    """Lines that say how many steps were repeated (`again`), and which steps cannot be verified."""
    if not possible:
        kept = "fewer than two checkpoints are kept; --from-start runs the steps up to the first checkpoint"
        return [f"no segment can be run again: {'the run was on several machines' if run.machines > 1 else kept}"]
    covered = sum(segment.steps for segment in again)
    lines = [f"{len(again)} of {len(possible)} segments were run again ({covered:,} of {run.last_step:,} steps)"]
    if first := possible[0].begin:
        lines.append(f"steps 1 to {first} are before the first checkpoint that is kept: --from-start runs them too")
    return lines


def not_to_the_bit(run: Recorded, segment: Segment, again: RunDir) -> list[str]:
    """Reasons why the segment may differ in last bits although nothing was changed; [] if each bit must be the same."""
    then, now = (_maker(record) for record in (run.record, again.read_record()))
    reasons = [f"{name} ({then[name]} in the run, {now[name]} here)" for name in then if then[name] != now[name]]
    if then["device"] != "cpu" and not run.record["config"].get("deterministic"):
        reasons.append("GPUs without --deterministic")
    layout = manifest.about(again.all_checkpoints()[-1]).get("layout")
    if any(run.saved[step].get("layout") != layout for step in run.saved.keys() & {segment.begin, segment.end}):
        reasons.append("the run was resumed under another launch")
    return reasons


def _maker(record: dict[str, Any]) -> dict[str, Any]:
    """Everything except settings and data that affects the last bits."""
    launch = record["launch"]
    return {
        "device": str(launch.get("device")).partition(" (")[0],
        "processor": mapping(launch.get("host")).get("processor"),
        "threads": launch.get("threads_per_process"),
        **mapping(launch.get("versions")),
        "accel_sft's code": record.get("package_code"),
    }


def run_again(run: Recorded, segment: Segment, tolerance: float) -> Finding:
    """Run the segment again, and say how weights, optimizer states and lines differ from the recorded ones. Where bits
    may differ, a relative difference of losses up to `tolerance` is allowed."""
    with tempfile.TemporaryDirectory(prefix="accel_sft-verify-") as folder:
        again = RunDir(Path(folder) / "run")
        _begin(run, segment, again)
        log = Path(folder) / "log"
        variables = {**_OFFLINE, **run.record["relaunch"]["environment"]}
        variables["OMP_NUM_THREADS"] = str(run.record["launch"].get("threads_per_process", 1))
        ends = run.complete and segment.end == run.last_step
        command = [*_launcher(run, Path(folder)), "-m", "accel_sft", "--config", str(run.run_dir.settings)]
        command += ["--output-dir", str(again.path), "--resume", "auto", "--tracker", "none"]
        command += ["--keep-checkpoints", _ALL, "--save-every", str(segment.end)]

        def watch() -> None:
            heartbeat()
            if not ends and again.checkpoint(segment.end).is_dir():  # the segment is complete
                kill_all(again.path)

        launch(command, variables, again.path, log, math.inf, watch)
        if not (again.final if ends else again.checkpoint(segment.end)).is_dir():
            cause = _cause(again, log)  # a missing file, or a full disk, proves nothing about the run
            return (differs if _REFUSED in cause else undecided)(str(segment), f"cannot be run again: {cause}")
        return _compared(run, segment, again, tolerance)


def _begin(run: Recorded, segment: Segment, again: RunDir) -> None:
    """Make the folder of a run that resumes at the segment's beginning."""
    run_dir = run.run_dir
    again.checkpoints.mkdir(parents=True)
    files = [run_dir.record, run_dir.batching, run_dir.most_tokens]
    if segment.begin:
        files += [run_dir.metrics]
        again.checkpoint(segment.begin).symlink_to(run_dir.checkpoint(segment.begin).resolve())
        if run_dir.base.is_dir():
            again.base.symlink_to(run_dir.base.resolve())
    for file in files:
        if file.is_file():
            shutil.copyfile(file, again.path / file.name)
    again.write_result({"status": "running"})


def _launcher(run: Recorded, folder: Path) -> list[str]:
    """The words before `-m accel_sft`: those of the recorded launch, with the present path of the run's launch.yaml."""
    if not (words := run.record["relaunch"]["words"]):
        return [sys.executable]
    accelerate = Path(words[0]).name == "accelerate"
    module = "accelerate.commands.launch" if accelerate else "torch.distributed.run"
    flags = words[2 if accelerate else 1 :]
    if not run.run_dir.launch.is_file():
        return [sys.executable, "-m", module, *flags]
    content = yaml.safe_load(read_text(run.run_dir.launch))
    if run.run_dir.deepspeed.is_file():
        content["deepspeed_config"]["deepspeed_config_file"] = str(run.run_dir.deepspeed.resolve())
    file = folder / "launch.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return [sys.executable, "-m", module, "--config_file", str(file), *flags, "--main_process_port", "0"]


def _cause(again: RunDir, log: Path) -> str:
    """Why a run ended, by its result or the end of its output."""
    last = [line for line in read_text(log, "replace").splitlines() if line.strip()][-1:]
    lines = str(_result(again).get("error") or "".join(last) or "it ended without a message").splitlines()
    return one_line(lines[0], LONGEST_ERROR)


def _compared(run: Recorded, segment: Segment, again: RunDir, tolerance: float) -> Finding:
    wrong = [*_weights(run, segment, again)]
    lines, off = _lines(run, segment, again)
    if not (wrong or lines):
        return holds(str(segment), "weights, optimizer states and log lines are the same to the bit")
    reasons = not_to_the_bit(run, segment, again)
    if reasons and off <= tolerance:
        within = f"losses are within {tolerance:g} of those recorded (largest difference {off:.1e})"
        return holds(str(segment), f"{within}; bits may differ: {', '.join(reasons)}")
    if reasons:
        lines.append(f"losses are off by up to {off:.1e}, more than --tolerance {tolerance:g}")
    return differs(str(segment), "; ".join([*lines, *wrong]))


def _weights(run: Recorded, segment: Segment, again: RunDir) -> Iterator[str]:
    """Yield which weights and optimizer states differ from those of the run."""
    step = segment.end
    if step in run.saved:
        then, now = (manifest.entries(run_dir.checkpoint(step)) for run_dir in (run.run_dir, again))
        if names := sorted(name for name in then.keys() | now.keys() if then.get(name) != now.get(name)):
            yield f"the checkpoint of step {step} has other weights or optimizer states ({', '.join(names)})"
    best = mapping(mapping(_result(run.run_dir)).get("best")).get("step")
    for name in ("final", "final_plain", "best"):
        old, new = getattr(run.run_dir, name), getattr(again, name)
        if new.is_dir() and (name != "best" or best == mapping(_result(again).get("best")).get("step")):
            files = sorted(path.name for path in new.glob("*.safetensors"))
            if any(not (old / file).is_file() or digest_of(old / file) != digest_of(new / file) for file in files):
                yield f"{old.name}/ has other weights"


def _result(run_dir: RunDir) -> dict[str, Any]:
    return mapping(json.loads(read_text(run_dir.result)))


def _lines(run: Recorded, segment: Segment, again: RunDir) -> tuple[list[str], float]:
    """The first difference in words, and the largest relative difference of losses (infinity: other values differ)."""
    within = range(segment.begin + (segment.begin > 0), segment.end + 1)
    made = {_key(line): line for line in read_lines(again.metrics)}
    differences: list[str] = []
    off = 0.0
    for line in run.lines:
        other = made.get(_key(line), {})
        if line["step"] not in within or not (other or "loss" in line):
            continue  # evaluations may have been at other steps before a resume
        keys = [key for key in dict.fromkeys([*line, *other]) if key not in _MEASURED]
        if wrong := [key for key in keys if line.get(key) != other.get(key)]:
            key = wrong[0]
            differences.append(f"step {line['step']}: {key} was {line.get(key)}, but {other.get(key)} when run again")
            off = max(off, _difference(line, other, wrong) if "loss" in line else 0.0)
    more = f" and {len(differences) - 1} more lines" if len(differences) > 1 else ""
    return [differences[0] + more] if differences else [], off


def _key(line: Mapping[str, Any]) -> tuple[int, bool]:
    return line["step"], "loss" in line


def _difference(line: Mapping[str, Any], other: Mapping[str, Any], wrong: list[str]) -> float:
    for key in {*wrong} - _COMPUTED:
        if not math.isclose(line.get(key) or math.nan, other.get(key) or math.nan, rel_tol=1e-9):
            return math.inf
    then, now = line["loss"], other.get("loss")
    return abs(then - now) / max(abs(then), 1e-9) if isinstance(then, float) and isinstance(now, float) else math.inf
