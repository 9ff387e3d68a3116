"""Runs `vllm_script` in another Python: sends heartbeats while it works, quotes its log if it fails, always ends it."""

import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch

from accel_sft.api.errors import UserError
from accel_sft.io.heartbeat import heartbeat
from accel_sft.io.terminal import terminal
from accel_sft.launch.activity import work
from accel_sft.tracking.system import GIB

SCRIPT, PREFIX = Path(__file__).with_name("vllm_script.py"), "accel-sft-vllm-"
POLL_SECONDS = 0.5
"""Seconds between two polls of the script."""
LEAST_CPU_SECONDS, LEAST_BYTES = 0.02, 4096
"""CPU seconds, and bytes read from or written to files, between two polls. A script below both makes no progress, and
no heartbeat is sent."""
END_SECONDS = 8.0
"""Maximum wait for the end of the script's process group, which is killed 5 s after standard input is closed."""
LAST_LINES, LONGEST_LINE = 10, 400
"""Maximum number of lines at the log's end that an error shows, and of characters of each."""


def run_script(
    python: str, request: dict[str, Any], environment: Mapping[str, str], log: Path | None, device: torch.device
) -> tuple[list[list[int]], float, dict[str, float]]:
    """Run the script; return its answers to the prompts, the seconds that generating took, and peak memory in GiB.

    No process of the script outlives this call, or this process if it is killed.

    Args:
        request: what `vllm_script` reads.
        log: file to which the script's output is appended; None: a temporary file, kept if the script fails.
        device: device whose memory is measured.
    Raises:
        UserError: the script failed or wrote no usable answers.
    """
    with (
        log.open("ab") if log else tempfile.NamedTemporaryFile(prefix=PREFIX, suffix=".log", delete=False) as output,
        tempfile.TemporaryDirectory(prefix=PREFIX) as folder,
    ):
        log_file, earlier = Path(output.name), output.tell()
        _print(f"starting {python}; its log: {log_file}")
        request_file, result_file = Path(folder, "request.json"), Path(folder, "result.json")
        request_file.write_text(json.dumps(request))
        words = [python, "-P", str(SCRIPT), str(request_file), str(result_file)]  # -P: no import from its folder
        status, peaks = _watched(words, environment, output, device)
        if status:
            raise UserError(_failure(f"ended with status {status}", log_file, earlier))
        try:
            result = json.loads(result_file.read_text())
            answers, seconds = result["answers"], float(result["seconds"])
            _check(answers, len(request["prompts"]), request["sampling"]["max_tokens"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(_failure(f"wrote no usable answers ({error!r})", log_file, earlier)) from None
    if log is None:
        log_file.unlink()
    _print(f"{len(answers)} answers in {seconds:.1f} s")
    return answers, seconds, peaks


def _watched(
    words: list[str], environment: Mapping[str, str], log: Any, device: torch.device
) -> tuple[int, dict[str, float]]:
    """Run the script until its process group is gone; return its exit status and its processes' peak memory, which is
    sampled twice a second. The script has a session of its own, so that an interrupt at the terminal reaches only this
    process, which then ends it."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    process = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
    )
    try:
        watched, before = psutil.Process(process.pid), (0.0, 0)
        peaks: dict[str, float] = {}
        while process.poll() is None:
            now = work(watched)
            # abs, because the sums fall when a child process of the script ends
            if abs(now[0] - before[0]) >= LEAST_CPU_SECONDS or abs(now[1] - before[1]) >= LEAST_BYTES:
                heartbeat()
            before = now
            taken = {"peak_host_memory_gib": _resident_bytes(watched)}
            if device.type == "cuda":
                taken["peak_device_memory_gib"] = free - torch.cuda.mem_get_info(device)[0]
            peaks = {name: max(size / GIB, peaks.get(name, 0.0)) for name, size in taken.items()}
            time.sleep(POLL_SECONDS)
        return process.returncode, peaks
    finally:
        process.communicate()  # closes its standard input, which ends the script's process group
        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no process is left, or on macOS only zombies
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def _resident_bytes(process: psutil.Process) -> int:
    """Return the resident memory of a process and its descendants; pages that they share count for each of them."""
    total = 0
    with contextlib.suppress(psutil.Error):  # a process that ends meanwhile spoils only this sample
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    return total


def _check(answers: Any, count: int, most: int) -> None:
    """Raise ValueError unless the answers are `count` lists of one to `most` token ids."""
    if not isinstance(answers, list) or len(answers) != count:
        raise ValueError(f"{count} prompts, and not as many answers")
    for number, ids in enumerate(answers):
        if not isinstance(ids, list) or not 1 <= len(ids) <= most or not all(type(i) is int and i >= 0 for i in ids):
            raise ValueError(f"answer {number}: expected 1 to {most} token ids, got {str(ids)[:80]}")


def _failure(what: str, log: Path, earlier: int) -> str:
    """`what` with the log's last lines, and above them earlier messages of exceptions, which often name the cause."""
    with log.open(encoding="utf-8", errors="replace", newline="\n") as file:
        file.seek(earlier)
        # of a progress bar, only the last state
        lines = [line.rstrip().rsplit("\r")[-1][:LONGEST_LINE] for line in file if line.strip()]
    last = lines[-LAST_LINES:]
    causes = [line for line in lines[:-LAST_LINES] if re.search(r"\b[A-Za-z]+(Error|Exception): ", line)]
    shown = [*dict.fromkeys(causes[-LAST_LINES:]), "...", *last] if causes else last
    return "\n    ".join([f"vllm {what}; the end of its log, {log}:", *shown])


def _print(text: str) -> None:
    print(f"vllm: {text}", file=terminal(), flush=True)
