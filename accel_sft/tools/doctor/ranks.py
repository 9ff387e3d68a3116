"""Checks that ranks reach each other: real processes add up numbers (an all-reduce) by gloo and, with GPUs, by NCCL."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from typing import IO

from accel_sft.tools.doctor.check import Finding, ok, problem
from accel_sft.tools.doctor.machine import Machine
from accel_sft.tools.doctor.processes import end, import_path, script

SECONDS = {"gloo": 30, "nccl": 120}
"""Time limit for joining the process group and adding up, once a rank has imported torch. NCCL first searches the
machine's links and network cards, and loads its kernels: tens of seconds on a busy machine with eight GPUs."""
START_SECONDS = 420
"""Time limit for everything, including the import of torch."""
GRACE_SECONDS = 3.0
"""Time that the other ranks have, after one rank has failed, to say why they failed."""
_FIXES = {
    "gloo": "see that this host's name resolves to one of its addresses (getent hosts $(hostname)); or else set "
    "GLOO_SOCKET_IFNAME=lo for one machine",
    "nccl": "NCCL_DEBUG=INFO shows where it stops; where GPUs cannot reach each other directly: NCCL_P2P_DISABLE=1",
}


def reached(machine: Machine) -> Iterator[Finding]:
    """Let two ranks on the CPU add up numbers by gloo, which every launch uses, then one rank on each GPU by NCCL."""
    if machine.torch.failure("torch"):
        return
    for backend, ranks in (("gloo", 2), ("nccl", machine.devices)):
        if not ranks or (backend == "nccl" and not machine.torch.cuda):
            continue
        began = time.monotonic()
        what = f"{ranks} ranks" if ranks > 1 else "one rank"
        if why := exchange(backend, ranks):
            machine.unusable["ranks"] = f"ranks do not reach each other ({backend})"
            yield problem(f"{what} did not add up numbers by {backend}: {why}", _FIXES[backend])
        else:
            yield ok(f"{what} added up numbers by {backend} ({time.monotonic() - began:.0f} s)")


def exchange(backend: str, ranks: int, seconds: int | None = None, more: Mapping[str, str] | None = None) -> str:
    """Start ranks on this machine as a launch would, and let them add up numbers once.

    Args:
        seconds: time limit for joining the process group and adding up; by default the backend's.
        more: environment variables for each rank.
    Returns:
        Why they failed; empty if they did not.
    """
    seconds = seconds or SECONDS[backend]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    world |= {"LOCAL_WORLD_SIZE": str(ranks), **import_path(), **(more or {})}
    processes: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryFile("w+") as errors:
        try:
            outputs = [tempfile.TemporaryFile("w+") for _ in range(ranks)]  # noqa: SIM115 - closed below
            for rank, out in enumerate(outputs):
                place = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(
                        script("rank_script", backend, str(seconds)),
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=errors,
                        text=True,
                        env={**os.environ, **world, **place},
                        start_new_session=True,
                    )
                )
            _wait(processes)
            return _why(
                [_said(out) for out in outputs], [process.poll() for process in processes], seconds, _text(errors)
            )
        finally:
            for process in processes:
                end(process)
                process.wait()
            for out in outputs:
                out.close()


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    """Wait until all ranks have ended, `GRACE_SECONDS` have passed since one failed, or the time is over."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        time.sleep(0.05)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _said(out: IO[str]) -> tuple[str, str]:
    """The last step that a rank reports as done, and what went wrong after it."""
    lines = [json.loads(line) for line in _text(out).splitlines(keepends=True) if line.endswith("}\n")]
    done = [line["step"] for line in lines if line["step"] != "failed"]
    return done[-1] if done else "did not import torch", lines[-1]["trouble"] if lines else ""


def _why(said: list[tuple[str, str]], statuses: list[int | None], seconds: int, errors: str) -> str:
    """Why the ranks failed, in the words of the lowest rank that knows; empty if all added up.

    A rank that runs out of time breaks its peers' connections, so what they report then is not the reason.
    """
    if all(each == ("done", "") for each in said):
        return ""
    for rank, ((_, trouble), status) in enumerate(zip(said, statuses, strict=True)):
        if status and status != -signal.SIGALRM and not trouble:
            last = next((line for line in reversed(errors.splitlines()) if line.strip()), "")
            how = f"with status {status}" if status > 0 else f"by {signal.Signals(-status).name}"
            return f"rank {rank} ended {how} {f'({last})' if last else ''}".rstrip()
    troubles = [f"rank {rank}: {trouble}" for rank, (_, trouble) in enumerate(said) if trouble]
    if troubles and -signal.SIGALRM not in statuses:
        return troubles[0]
    return f"no sum within {seconds} s ({', '.join(f'rank {rank} {step}' for rank, (step, _) in enumerate(said))})"
