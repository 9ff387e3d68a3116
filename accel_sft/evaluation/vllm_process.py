"""Runs `vllm_script` in another Python: started, watched by the heartbeat, its log read on failure, always ended."""

from __future__ import annotations

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

SCRIPT = Path(__file__).with_name("vllm_script.py")
POLL_SECONDS, MESSAGE_SECONDS = 0.5, 30.0
"""Between two looks at the script, and between two lines that say that it is still at work."""
LEAST_CPU_SECONDS, LEAST_BYTES = 0.02, 4096
"""CPU time and bytes from or to files between two looks. Below both, the script makes no progress: no heartbeat."""
END_SECONDS = 8.0
"""For the script's process group to be gone; the group is killed five seconds after standard input is closed."""
LAST_LINES, LONGEST_LINE = 10, 400
"""Of the log, in an error."""
GIB = 2**30


def run_script(
    python: str, request: dict[str, Any], environment: Mapping[str, str], log: Path | None, device: torch.device
) -> tuple[list[list[int]], float, dict[str, float]]:
    """Answers to the request's prompts, the seconds they took to generate, and the largest memory in GiB.

    No process of the script outlives this call, or this process if it is killed.

    Args:
        python: the interpreter of vLLM's environment.
        request: what `vllm_script` reads.
        environment: all of its variables.
        log: what it prints is appended to it; None: a temporary file, kept if the script fails.
        device: whose memory is measured.
    Raises:
        UserError: the script failed or wrote no usable answers.
    """
    temporary = log is None
    if log is None:
        handle, name = tempfile.mkstemp(prefix="accel-sft-vllm-", suffix=".log")
        os.close(handle)
        log = Path(name)
    earlier = log.stat().st_size if log.exists() else 0
    _print(f"starting {python}; its log: {log}")
    with tempfile.TemporaryDirectory(prefix="accel-sft-vllm-") as folder:
        files = Path(folder, "request.json"), Path(folder, "result.json")
        files[0].write_text(json.dumps(request))
        words = [python, "-P", str(SCRIPT), *map(str, files)]  # -P: a module beside the script shadows no library
        with log.open("ab") as output, _started(words, environment, output) as process:
            peaks = _wait(process, device)
        try:
            if process.returncode:
                raise ValueError(f"ended with status {process.returncode}")
            result = json.loads(files[1].read_text())
            answers, seconds = result["answers"], float(result["seconds"])
            _check(answers, len(request["prompts"]), request["sampling"]["max_tokens"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            what = str(error) if process.returncode else f"wrote no usable answers ({error!r})"
            raise UserError(_failure(what, log, earlier)) from None
    if temporary:
        log.unlink()
    _print(f"{len(answers)} answers in {seconds:.1f} s")
    return answers, seconds, peaks


@contextlib.contextmanager
def _started(words: list[str], environment: Mapping[str, str], log: Any) -> Any:
    """The process, in a session of its own: an interrupt at the terminal is for this process, which then ends it."""
    process = subprocess.Popen(
        words,
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.stdin.close()  # whereupon the script's process group is ended
        process.wait()
        until = time.monotonic() + END_SECONDS
        with contextlib.suppress(ProcessLookupError, PermissionError):  # none left, or on macOS zombies only
            while time.monotonic() < until:
                os.killpg(process.pid, 0)
                time.sleep(0.05)


def _wait(process: subprocess.Popen, device: torch.device) -> dict[str, float]:
    """Wait for the process to end; the largest memory of its processes, as far as samples show it."""
    started = shown = time.monotonic()
    watched, before, on_gpu = psutil.Process(process.pid), (0.0, 0), device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if on_gpu else 0
    peaks = {"peak_device_memory_gib": 0.0} if on_gpu else {}
    peaks["peak_host_memory_gib"] = 0.0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_SECONDS)
            return peaks
        now = work(watched)
        # the sums fall when a process below the script ends
        if abs(now[0] - before[0]) >= LEAST_CPU_SECONDS or abs(now[1] - before[1]) >= LEAST_BYTES:
            heartbeat()
        before = now
        taken = {"peak_host_memory_gib": _resident_bytes(watched)}
        if on_gpu:
            taken["peak_device_memory_gib"] = free - torch.cuda.mem_get_info(device)[0]
        peaks = {name: max(most, taken[name] / GIB) for name, most in peaks.items()}
        if time.monotonic() - shown > MESSAGE_SECONDS:
            shown = time.monotonic()
            _print(f"at work for {shown - started:.0f} s")


def _resident_bytes(process: psutil.Process) -> int:
    """Host memory of a process and those below it; pages that they share count for each."""
    total, processes = 0, [process]
    with contextlib.suppress(psutil.Error):
        processes += process.children(recursive=True)
    for each in processes:
        with contextlib.suppress(psutil.Error):
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
    """`what` with the log's last lines, and above them what exceptions said: the cause is often far before."""
    with log.open(encoding="utf-8", errors="replace", newline="\n") as file:
        file.seek(earlier)
        # of a progress bar only the last state
        lines = [line.rstrip().rsplit("\r")[-1][:LONGEST_LINE] for line in file if line.strip()]
    last = lines[-LAST_LINES:]
    causes = [line for line in lines[:-LAST_LINES] if re.search(r"\b[A-Za-z]+(Error|Exception): ", line)]
    shown = [*dict.fromkeys(causes[-LAST_LINES:]), "...", *last] if causes else last
    return "\n    ".join([f"vllm {what}; the end of its log, {log}:", *shown])


def _print(text: str) -> None:
    print(f"vllm: {text}", file=terminal(), flush=True)
