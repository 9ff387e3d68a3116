"""The probe: runs two real steps of the planned command on this machine, and reads the peaks of memory it records."""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accel_sft.io.run_dir import RunDir
from accel_sft.launch.parallelism import sized
from accel_sft.memory.estimate import CUDA_BYTES, PHASES, Estimate
from accel_sft.memory.job import Job
from accel_sft.tools.compare.launching import launch
from accel_sft.tools.compare.outcome import outcome

GIB = 2**30
LIMIT_SECONDS = 3600.0
"""Time limit for loading, two steps and the export together."""
MEASURED = "measured"
"""Name of the component that stands for a whole measured phase, whose parts are not known."""
_FEW_STEPS = {"max-steps": "2", "eval-every": "off", "save-every": "off", "tracker": "none"}


def probe(job: Job, file: Path, words: Sequence[str], limit_seconds: float = LIMIT_SECONDS) -> Estimate:
    """Launch the planned run on this machine for two steps, without evaluation and checkpoints, and measure its memory.

    The run's folder is temporary, and holds the exported weights for a moment. If the run fails, runs out of memory or
    takes too long, the estimate has a `failure` and no memory.

    Args:
        job: the planned job; its device and its number of ranks must suit this machine.
        file: the launch file.
        words: the task and the run's options, as words of a command line.
    """
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += [*sized(job.launch, job.ranks), "--main_process_port", "0", "-m", "accel_sft", *words]
    for name, value in _FEW_STEPS.items():
        command += [f"--{name}", value]
    with tempfile.TemporaryDirectory(prefix="accel-sft-probe-") as folder:
        run_dir, log = RunDir(Path(folder) / "run"), Path(folder) / "log"
        command += ["--output-dir", str(run_dir)]
        ended = launch(command, {}, run_dir.path, log, limit_seconds, lambda: None)
        status, reason = outcome(ended, run_dir, log, limit_seconds)
        if ended.over_time:
            reason = f"not done after {limit_seconds / 60:g} minutes"
        if reason:
            failure = reason if status == "failed" else f"{status}: {reason}"
            return Estimate(method="probe", device={}, host={}, failure=failure)
        return measured(job, json.loads(run_dir.result.read_text(encoding="utf-8")))


def measured(job: Job, result: Mapping[str, Any]) -> Estimate:
    """The memory that a run's result.json records, in the form of an estimate."""
    device: dict[str, dict[str, float]] = {}
    host: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        peaks = result["memory_by_phase"].get(phase, {})
        host[phase] = {MEASURED: GIB * peaks["peak_host_memory_gib"]} if peaks else {}
        if peaks.get("peak_device_memory_gib") is not None:
            device[phase] = {MEASURED: GIB * peaks["peak_device_memory_gib"], "overhead": CUDA_BYTES}
    tokens, supervised, *_ = result["forward"]
    notes = [f"measured in two steps, whose largest forward had {tokens:,} tokens ({supervised:,} supervised)"]
    if device:
        notes.append("overhead, outside of torch's allocator, is the closed form's")
    if tokens < job.tokens:
        notes.append(f"the longest forward that is planned has {job.tokens:,} tokens, and may take more")
    return Estimate(
        method="probe",
        device=device,
        host={phase: components for phase, components in host.items() if components},
        local_ranks=job.local_ranks,
        notes=tuple(notes),
    )
